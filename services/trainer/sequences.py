"""Sums over whole trajectories within packed rows, given back at each of their tokens.

Shapes: [B rows, T tokens]; a trajectory is the tokens of one row that share a segment id.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sequence_sum(values_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """At each token the sum over its trajectory. Rows stay apart, so a batch sharded by rows needs no exchange."""
    segments = values_BT.shape[1] + 1

    def of_row(values_T: jax.Array, ids_T: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values_T, ids_T, num_segments=segments)[ids_T]

    return jax.vmap(of_row)(values_BT, segment_ids_BT)


def sequence_mean(values_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """At each token the mean over its trajectory's masked tokens; 0 where it has none."""
    total_BT = sequence_sum(jnp.where(mask_BT, values_BT, 0), segment_ids_BT)
    return total_BT / jnp.maximum(sequence_length(mask_BT, segment_ids_BT), 1)


def sequence_length(mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """float32: at each token the number of masked tokens of its trajectory."""
    return sequence_sum(mask_BT.astype(jnp.float32), segment_ids_BT)


def sequence_all(values_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """At each token whether the value holds at every masked token of its trajectory."""
    return sequence_sum((mask_BT & ~values_BT).astype(jnp.float32), segment_ids_BT) == 0
