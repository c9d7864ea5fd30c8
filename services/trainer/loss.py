"""Policy losses, token by token; sums and counts, never means.

Shapes: every array is [B, T], values belong to the token at the same place.
"""

from __future__ import annotations

import jax


def clipped_policy_loss(
    logprobs_BT: jax.Array,
    anchor_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[jax.Array, jax.Array]:
    """PPO's clipped surrogate with DAPO's clip-higher. Returns (loss_BT, ratio_BT)."""
    raise NotImplementedError


def truncated_importance_weights(logprobs_BT: jax.Array, behaviour_logprobs_BT: jax.Array, *, cap: float) -> jax.Array:
    """min(pi / mu, cap), detached."""
    raise NotImplementedError


def k3_divergence(logprobs_BT: jax.Array, reference_logprobs_BT: jax.Array) -> jax.Array:
    """Schulman's k3 estimate of KL(policy || reference)."""
    raise NotImplementedError
