"""AdamW and the schedule of its learning rate."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax

from headrace import config

Schedule = Callable[[jax.Array | int], jax.Array]


def schedule(settings: config.Optimizer, *, steps: int, updates_per_step: int = 1) -> Schedule:
    """Learning rate by number of updates made: warm-up, then the decay that the config names, over all updates."""
    raise NotImplementedError


def create(settings: config.Optimizer, *, steps: int, updates_per_step: int = 1) -> optax.GradientTransformation:
    """AdamW after clipping by global norm, at the scheduled rate."""
    raise NotImplementedError
