"""Off-policy corrections: weights of tokens by how the trainer's policy differs from the sampler's. No gradient.

Each takes log importance weights [B, T], log pi_start - log mu. A correction weighs tokens; a rejection takes them out
of the loss, and out of what losses are averaged over: the others' gradient does not shrink for it
(https://github.com/THUDM/slime/pull/657). https://verl.readthedocs.io/en/latest/algo/rollout_corr.html has them all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from headrace import config
from services.trainer.ratio import bounded_exp
from services.trainer.sequences import sequence_all, sequence_mean, sequence_sum


def correct(
    log_weights_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array, settings: config.Loss
) -> tuple[jax.Array, jax.Array]:
    """The weight of each token, and which of the masked tokens stay in the loss."""
    weights_BT, kept_BT = jnp.ones_like(log_weights_BT), mask_BT
    if settings.correction == "token_tis":
        weights_BT = token_tis(log_weights_BT, cap=settings.correction_cap)
    elif settings.correction == "sequence_tis":
        weights_BT = sequence_tis(log_weights_BT, mask_BT, segment_ids_BT, cap=settings.correction_cap)
    elif settings.correction == "icepop":
        weights_BT = bounded_exp(log_weights_BT)
        kept_BT &= within(weights_BT, *settings.icepop_bounds)
    if settings.geometric_bounds:
        kept_BT &= within(geometric_weights(log_weights_BT, mask_BT, segment_ids_BT), *settings.geometric_bounds)
    if settings.veto_bounds:
        fine_BT = within(bounded_exp(log_weights_BT), *settings.veto_bounds)
        kept_BT &= sequence_all(fine_BT, mask_BT, segment_ids_BT)
    return jax.lax.stop_gradient(weights_BT), kept_BT


def token_tis(log_weights_BT: jax.Array, *, cap: float) -> jax.Array:
    """min(pi_start / mu, cap). https://fengyao.notion.site/off-policy-rl"""
    return jnp.minimum(bounded_exp(log_weights_BT), cap)


def sequence_tis(log_weights_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array, *, cap: float) -> jax.Array:
    """min(product over the trajectory of pi_start / mu, cap), at each of its tokens.

    https://fengyao.notion.site/off-policy-rl, the sequence-level variant
    """
    total_BT = sequence_sum(jnp.where(mask_BT, log_weights_BT, 0), segment_ids_BT)
    return jnp.minimum(bounded_exp(total_BT), cap)


def geometric_weights(log_weights_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """The geometric mean of the trajectory's pi_start / mu, at each of its tokens."""
    return bounded_exp(sequence_mean(log_weights_BT, mask_BT, segment_ids_BT))


def within(values_BT: jax.Array, low: float, high: float) -> jax.Array:
    """Whether each value is in [low, high]. Of tokens' weights: IcePop, https://arxiv.org/abs/2510.18855, section 3."""
    return (values_BT >= low) & (values_BT <= high)
