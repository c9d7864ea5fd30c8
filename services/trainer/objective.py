"""Surrogate objectives, token by token: how far a policy may move from its anchor. Pure functions of arrays.

Each takes log pi (with gradient), log pi_anchor and advantages [B, T], and returns losses and ratios of that shape.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from services.trainer.ratio import bounded_exp, bounded_ratio
from services.trainer.sequences import sequence_mean


def ppo(
    logprobs_BT: jax.Array,
    anchor_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """PPO's surrogate with a bound of its own for each side, and a limit to what a negative advantage weighs.

    r = pi / pi_anchor;  L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high));  where A < 0: min(L, -dual_clip A).
    https://arxiv.org/abs/1707.06347, equation 7; clip-higher: https://arxiv.org/abs/2503.14476, section 3.1;
    dual clip: https://arxiv.org/abs/1912.09729, equation 5
    """
    ratios_BT = bounded_ratio(logprobs_BT, anchor_logprobs_BT)
    return _clipped(ratios_BT, advantages_BT, clip_low, clip_high, dual_clip), ratios_BT


def gspo(
    logprobs_BT: jax.Array,
    anchor_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    *,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
    clip_low: float,
    clip_high: float,
) -> tuple[jax.Array, jax.Array]:
    """One ratio for a trajectory, clipped as PPO's; in the form that admits an advantage of its own for each token.

    s = exp(mean over the trajectory's action tokens of log pi - log pi_anchor);  s_t = sg(s) pi_t / sg(pi_t).
    GSPO-token, https://arxiv.org/abs/2507.18071, equations 5, 13 and 14
    """
    log_ratios_BT = logprobs_BT - anchor_logprobs_BT
    of_sequence_BT = jax.lax.stop_gradient(sequence_mean(log_ratios_BT, mask_BT, segment_ids_BT))
    ratios_BT = bounded_exp(of_sequence_BT + logprobs_BT - jax.lax.stop_gradient(logprobs_BT))
    return _clipped(ratios_BT, advantages_BT, clip_low, clip_high, None), ratios_BT


def cispo(
    logprobs_BT: jax.Array,
    anchor_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[jax.Array, jax.Array]:
    """REINFORCE weighed by a clipped ratio: the clip bounds a token's weight and takes no token's gradient away.

    L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi.  https://arxiv.org/abs/2506.13585, equations 4 and 5
    """
    ratios_BT = bounded_ratio(logprobs_BT, anchor_logprobs_BT)
    weights_BT = jax.lax.stop_gradient(jnp.clip(ratios_BT, 1 - clip_low, 1 + clip_high))
    return -weights_BT * advantages_BT * logprobs_BT, ratios_BT


def _clipped(
    ratios_BT: jax.Array, advantages_BT: jax.Array, clip_low: float, clip_high: float, dual_clip: float | None
) -> jax.Array:
    clipped_BT = jnp.clip(ratios_BT, 1 - clip_low, 1 + clip_high)
    losses_BT = jnp.maximum(-advantages_BT * ratios_BT, -advantages_BT * clipped_BT)
    if dual_clip is None:
        return losses_BT
    return jnp.where(advantages_BT < 0, jnp.minimum(losses_BT, -dual_clip * advantages_BT), losses_BT)
