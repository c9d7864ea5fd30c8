"""Ratios of probabilities from their logarithms, kept finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# exp(20) is 4.9e8: its square and sums of it stay finite in float32.
MAX_LOG_RATIO = 20.0


def bounded_ratio(logprobs_BT: jax.Array, other_logprobs_BT: jax.Array) -> jax.Array:
    """exp(log pi - log other), the exponent kept within MAX_LOG_RATIO so that no ratio overflows."""
    return bounded_exp(logprobs_BT - other_logprobs_BT)


def bounded_exp(log_ratios_BT: jax.Array) -> jax.Array:
    """exp, the exponent kept within MAX_LOG_RATIO."""
    return jnp.exp(jnp.clip(log_ratios_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO))
