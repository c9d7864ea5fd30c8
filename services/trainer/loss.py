"""The policy loss: objective, correction, divergence and entropy of each token, and their sum over a microbatch.

Nothing here is a mean: `policy_loss` returns a weighed sum over action tokens and the denominator that belongs to it,
and who adds up microbatches divides once. Pure functions of arrays.

Shapes: every array is [B rows, T tokens], its values belong to the token at the same place; suffix _BT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from headrace import config
from services.trainer import objective
from services.trainer.correction import correct
from services.trainer.divergence import divergence
from services.trainer.metrics import Metrics
from services.trainer.ratio import bounded_ratio
from services.trainer.sequences import sequence_length


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossInputs:
    """What the loss reads besides the policy's own scores, float32[B, T] where nothing else is said; a pytree.

    Values outside the mask, NaN and infinities too, reach neither loss nor gradient.
    """

    mask: jax.Array  # bool, True at action tokens
    segment_ids: jax.Array  # int32, from 1 within each row, 0 is padding
    advantages: jax.Array
    behaviour_logprobs: jax.Array  # log mu, of the sampler
    ages: jax.Array  # updates between the weights that sampled the token and those at the start of the step
    start_logprobs: jax.Array | None = None  # log pi at the start of the step; for anchor "start"
    reference_logprobs: jax.Array | None = None  # log pi_reference; for a divergence in the loss
    progress: jax.Array | float = 0.0  # float32[], share of the step's updates that are made; for "interpolated"


def policy_loss(
    logprobs_BT: jax.Array, entropies_BT: jax.Array, inputs: LossInputs, settings: config.Loss
) -> tuple[jax.Array, Metrics]:
    """Sum over action tokens of a (w L + kl_coefficient KL - entropy_coefficient H); gradients flow through pi alone.

    L is the objective's, w the correction's weight and a the aggregation's; metrics.denominator divides the sum.
    """
    mask_BT = inputs.mask

    def masked(values_BT: jax.Array) -> jax.Array:
        # Before anything is computed with them: 0 times NaN is NaN, in the gradient too.
        return jnp.where(mask_BT, values_BT, 0)

    logprobs, entropies = masked(logprobs_BT), masked(entropies_BT)
    behaviour, advantages = masked(inputs.behaviour_logprobs), masked(inputs.advantages)
    anchor = _anchor(jax.lax.stop_gradient(logprobs), behaviour, masked, inputs, settings)
    start = jax.lax.stop_gradient(logprobs) if settings.anchor == "sampler" else anchor
    losses, ratios = _objective(logprobs, anchor, advantages, inputs, settings)
    weights, kept_BT = correct(start - behaviour, mask_BT, inputs.segment_ids, settings)
    losses *= weights
    divergences = jnp.zeros_like(logprobs)
    if settings.has_divergence:
        assert inputs.reference_logprobs is not None, "a divergence needs the reference's logprobs"
        divergences = divergence(logprobs, masked(inputs.reference_logprobs), settings.kl_estimator)
        losses += settings.kl_coefficient * divergences
    if settings.entropy_coefficient > 0:
        losses -= settings.entropy_coefficient * entropies

    def total(values_BT: jax.Array) -> jax.Array:
        return jnp.sum(masked(values_BT), dtype=jnp.float32)

    def largest(values_BT: jax.Array) -> jax.Array:
        return jnp.max(masked(values_BT))

    shares, denominator = aggregation_weights(kept_BT, inputs.segment_ids, settings)
    loss = jnp.sum(jnp.where(kept_BT, losses * shares, 0), dtype=jnp.float32)
    importances = bounded_ratio(logprobs, behaviour)
    gaps = jnp.abs(start - behaviour)
    metrics = Metrics(
        tokens=jnp.sum(mask_BT, dtype=jnp.float32),
        denominator=denominator,
        loss=loss,
        entropy=total(entropies),
        clipped_low=total((ratios < 1 - settings.clip_low) & (advantages < 0)),
        clipped_high=total((ratios > 1 + settings.clip_high) & (advantages > 0)),
        ratio=total(ratios),
        ratio_max=largest(ratios),
        sampler_gap=total(gaps),
        sampler_gap_max=largest(gaps),
        sampler_kl=total(divergence(behaviour, logprobs, "k3")),
        importance=total(importances),
        importance_squared=total(importances * importances),
        correction_weight=total(weights),
        rejected=total(~kept_BT),
        reference_kl=total(divergences),
    )
    return loss, jax.lax.stop_gradient(metrics)


def aggregation_weights(
    mask_BT: jax.Array, segment_ids_BT: jax.Array, settings: config.Loss
) -> tuple[jax.Array, jax.Array]:
    """The share of each token's loss in the sum, and what the sum over all microbatches is divided by.

        token_mean                 sum over tokens / tokens              https://arxiv.org/abs/2503.14476, equation 8
        sequence_mean_token_mean   mean over trajectories of their means https://arxiv.org/abs/2402.03300, equation 3
        sequence_mean_token_sum    mean over trajectories of their sums
        sequence_mean_constant     the same / aggregation_tokens         https://arxiv.org/abs/2503.20783, section 3

    Returns:
        shares_BT and the denominator of this microbatch, float32[].
    """
    tokens = jnp.sum(mask_BT, dtype=jnp.float32)
    if settings.aggregation == "token_mean":
        return jnp.ones(mask_BT.shape, jnp.float32), tokens
    inverse_BT = 1 / jnp.maximum(sequence_length(mask_BT, segment_ids_BT), 1)
    sequences = jnp.round(jnp.sum(jnp.where(mask_BT, inverse_BT, 0)))
    if settings.aggregation == "sequence_mean_token_mean":
        return inverse_BT, sequences
    length = settings.aggregation_tokens if settings.aggregation == "sequence_mean_constant" else 1
    return jnp.full(mask_BT.shape, 1 / length, jnp.float32), sequences


def cross_entropy(logprobs_BT: jax.Array, entropies_BT: jax.Array, mask_BT: jax.Array) -> tuple[jax.Array, Metrics]:
    """Sum over action tokens of -log pi, for supervised training."""
    loss = -jnp.sum(jnp.where(mask_BT, logprobs_BT, 0), dtype=jnp.float32)
    entropy = jnp.sum(jnp.where(mask_BT, entropies_BT, 0), dtype=jnp.float32)
    tokens = jnp.sum(mask_BT, dtype=jnp.float32)
    metrics = Metrics.zeros().replace(tokens=tokens, denominator=tokens, loss=loss, entropy=entropy)
    return loss, jax.lax.stop_gradient(metrics)


def interpolated_logprobs(
    logprobs_BT: jax.Array, behaviour_logprobs_BT: jax.Array, ages_BT: jax.Array, progress: jax.Array | float
) -> jax.Array:
    """An estimate of log pi_start that costs no forward pass: on the line from log mu to log pi, by their distances.

    log mu + age / (age + progress) (log pi - log mu). A token is `age` updates behind the start of the step, pi is a
    share `progress` of one before it. https://inclusionai.github.io/AReaL/algorithms/prox_approx.html
    """
    distance_BT = ages_BT + progress
    share_BT = jnp.where(distance_BT > 0, ages_BT / jnp.maximum(distance_BT, 1e-6), 1.0)
    return behaviour_logprobs_BT + share_BT * (logprobs_BT - behaviour_logprobs_BT)


def _anchor(
    logprobs: jax.Array,
    behaviour: jax.Array,
    masked: Callable[[jax.Array], jax.Array],
    inputs: LossInputs,
    settings: config.Loss,
) -> jax.Array:
    """What the ratio is measured from; `logprobs` carry no gradient."""
    if settings.anchor == "start":
        assert inputs.start_logprobs is not None, "anchor: start needs the logprobs at the start of the step"
        return masked(inputs.start_logprobs)
    if settings.anchor == "interpolated":
        return interpolated_logprobs(logprobs, behaviour, masked(inputs.ages), inputs.progress)
    return behaviour


def _objective(
    logprobs: jax.Array, anchor: jax.Array, advantages: jax.Array, inputs: LossInputs, settings: config.Loss
) -> tuple[jax.Array, jax.Array]:
    clips = {"clip_low": settings.clip_low, "clip_high": settings.clip_high}
    if settings.objective == "gspo":
        return objective.gspo(
            logprobs, anchor, advantages, mask_BT=inputs.mask, segment_ids_BT=inputs.segment_ids, **clips
        )
    if settings.objective == "cispo":
        return objective.cispo(logprobs, anchor, advantages, **clips)
    return objective.ppo(logprobs, anchor, advantages, **clips, dual_clip=settings.dual_clip)
