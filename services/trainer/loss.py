"""Losses of a policy, token by token, and their sums over a microbatch. Pure functions of arrays.

Nothing here is a mean: `policy_loss` returns a sum over action tokens, and who adds up microbatches divides once.

Shapes: every array is [B rows, T tokens], its values belong to the token at the same place; suffix _BT.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from headrace import config
from services.trainer.metrics import Metrics

# exp(20) is 4.9e8: its square and sums of it stay finite in float32.
MAX_LOG_RATIO = 20.0


def policy_loss(
    logprobs_BT: jax.Array,
    entropies_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    behaviour_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    proximal_logprobs_BT: jax.Array | None,
    reference_logprobs_BT: jax.Array | None,
    settings: config.Loss,
) -> tuple[jax.Array, Metrics]:
    """Sum over action tokens of w L_clip + kl_coefficient KL - entropy_coefficient H; gradients flow through pi alone.

    With correction "none", the ratio of L_clip is pi / mu and w is 1; with "token_tis" it is pi / pi_proximal and w is
    the truncated pi_proximal / mu (https://fengyao.notion.site/off-policy-rl, decoupled as in
    https://arxiv.org/abs/2110.00641).

    Args:
        mask_BT: True at action tokens. Values elsewhere, NaN and infinities too, reach neither loss nor gradient.
        behaviour_logprobs_BT: log mu, of the sampler.
        proximal_logprobs_BT: log pi_proximal, of the trainer at the start of the step; for "token_tis".
        reference_logprobs_BT: log pi_reference; for kl_coefficient > 0.
    """
    logprobs, entropies, behaviour = (_where(mask_BT, x) for x in (logprobs_BT, entropies_BT, behaviour_logprobs_BT))
    advantages = _where(mask_BT, advantages_BT)
    if settings.correction == "token_tis":
        assert proximal_logprobs_BT is not None, "token_tis needs the proximal policy's logprobs"
        anchor = start = _where(mask_BT, proximal_logprobs_BT)
        weights = truncated_importance_weights(anchor, behaviour, cap=settings.tis_cap)
    else:
        anchor, start, weights = behaviour, logprobs, jnp.ones_like(logprobs)
    losses, ratios = clipped_policy_loss(
        logprobs, anchor, advantages, clip_low=settings.clip_low, clip_high=settings.clip_high
    )
    losses *= weights
    divergences = jnp.zeros_like(logprobs)
    if settings.kl_coefficient > 0:
        assert reference_logprobs_BT is not None, "kl_coefficient needs the reference's logprobs"
        divergences = k3_divergence(logprobs, _where(mask_BT, reference_logprobs_BT))
        losses += settings.kl_coefficient * divergences
    if settings.entropy_coefficient > 0:
        losses -= settings.entropy_coefficient * entropies

    def total(values_BT: jax.Array) -> jax.Array:
        return jnp.sum(_where(mask_BT, values_BT), dtype=jnp.float32)

    def largest(values_BT: jax.Array) -> jax.Array:
        return jnp.max(_where(mask_BT, values_BT))

    loss = total(losses)
    importances = bounded_ratio(logprobs, behaviour)
    gaps = jnp.abs(start - behaviour)
    metrics = Metrics(
        tokens=jnp.sum(mask_BT, dtype=jnp.float32),
        loss=loss,
        entropy=total(entropies),
        clipped_low=total((ratios < 1 - settings.clip_low) & (advantages < 0)),
        clipped_high=total((ratios > 1 + settings.clip_high) & (advantages > 0)),
        ratio=total(ratios),
        ratio_max=largest(ratios),
        sampler_gap=total(gaps),
        sampler_gap_max=largest(gaps),
        sampler_kl=total(k3_divergence(behaviour, logprobs)),
        importance=total(importances),
        importance_squared=total(importances * importances),
        tis_weight=total(weights),
        tis_capped=total(weights >= settings.tis_cap),
        reference_kl=total(divergences),
    )
    return loss, jax.lax.stop_gradient(metrics)


def clipped_policy_loss(
    logprobs_BT: jax.Array,
    anchor_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[jax.Array, jax.Array]:
    """PPO's surrogate with a bound of its own for each side.

    r = pi / pi_anchor;  L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)).
    https://arxiv.org/abs/1707.06347, equation 7; clip-higher: https://arxiv.org/abs/2503.14476, section 3.1

    Returns:
        losses_BT and ratios_BT.
    """
    ratios_BT = bounded_ratio(logprobs_BT, anchor_logprobs_BT)
    clipped_BT = jnp.clip(ratios_BT, 1 - clip_low, 1 + clip_high)
    return jnp.maximum(-advantages_BT * ratios_BT, -advantages_BT * clipped_BT), ratios_BT


def truncated_importance_weights(logprobs_BT: jax.Array, behaviour_logprobs_BT: jax.Array, *, cap: float) -> jax.Array:
    """w = min(pi / mu, cap), a constant to the gradient. https://fengyao.notion.site/off-policy-rl"""
    return jax.lax.stop_gradient(jnp.minimum(bounded_ratio(logprobs_BT, behaviour_logprobs_BT), cap))


def k3_divergence(logprobs_BT: jax.Array, reference_logprobs_BT: jax.Array) -> jax.Array:
    """KL(pi || reference) from samples of pi: d = log reference - log pi;  exp(d) - d - 1, which is never negative.

    http://joschu.net/blog/kl-approx.html
    """
    d_BT = jnp.clip(reference_logprobs_BT - logprobs_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.exp(d_BT) - d_BT - 1


def cross_entropy(logprobs_BT: jax.Array, entropies_BT: jax.Array, mask_BT: jax.Array) -> tuple[jax.Array, Metrics]:
    """Sum over action tokens of -log pi, for supervised training."""
    loss = -jnp.sum(_where(mask_BT, logprobs_BT), dtype=jnp.float32)
    entropy = jnp.sum(_where(mask_BT, entropies_BT), dtype=jnp.float32)
    metrics = Metrics.zeros().replace(tokens=jnp.sum(mask_BT, dtype=jnp.float32), loss=loss, entropy=entropy)
    return loss, jax.lax.stop_gradient(metrics)


def bounded_ratio(logprobs_BT: jax.Array, other_logprobs_BT: jax.Array) -> jax.Array:
    """exp(log pi - log other), the exponent kept within MAX_LOG_RATIO so that no ratio overflows."""
    return jnp.exp(jnp.clip(logprobs_BT - other_logprobs_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _where(mask_BT: jax.Array, values_BT: jax.Array) -> jax.Array:
    """Replaces masked values before they are computed with: 0 times NaN is NaN, in the gradient too."""
    return jnp.where(mask_BT, values_BT, 0)
