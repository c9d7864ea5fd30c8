"""Estimates of KL(pi || reference), token by token, from samples of pi. http://joschu.net/blog/kl-approx.html

d = log pi - log reference, [B, T], kept within MAX_LOG_RATIO:

    k1 = d                  unbiased; as a loss its gradient is zero in expectation, so it is for rewards only
    k2 = d^2 / 2            as a loss its gradient is that of the divergence (https://arxiv.org/abs/2510.01555)
    k3 = exp(-d) + d - 1    unbiased and never negative
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from services.trainer.ratio import MAX_LOG_RATIO


def divergence(
    logprobs_BT: jax.Array, reference_logprobs_BT: jax.Array, estimator: Literal["k1", "k2", "k3"]
) -> jax.Array:
    """The estimate at each token, in nats."""
    d_BT = jnp.clip(logprobs_BT - reference_logprobs_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return d_BT
    if estimator == "k2":
        return d_BT * d_BT / 2
    return jnp.exp(-d_BT) + d_BT - 1
