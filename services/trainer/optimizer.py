"""AdamW and the schedule of its learning rate."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from headrace import config

Schedule = Callable[[jax.Array | int], jax.Array]


def create(settings: config.Optimizer, *, steps: int, updates_per_step: int = 1) -> optax.GradientTransformation:
    """AdamW at the scheduled rate, after clipping to the global norm `max_gradient_norm`.

    Norms and biases, the parameters of one dimension, do not decay. https://arxiv.org/abs/1711.05101
    """
    return optax.chain(
        optax.clip_by_global_norm(settings.max_gradient_norm),
        optax.adamw(
            schedule(settings, steps=steps, updates_per_step=updates_per_step),
            b1=settings.beta1,
            b2=settings.beta2,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            mask=lambda parameters: jax.tree.map(lambda parameter: parameter.ndim > 1, parameters),
        ),
    )


def schedule(settings: config.Optimizer, *, steps: int, updates_per_step: int = 1) -> Schedule:
    """Learning rate of the update after `count` updates.

    It rises in equal parts over the updates of `warmup_steps`, reaching the full rate with the last of them, then
    decays to `final_fraction` of it at the end of the run's `steps`, and stays there.
    """
    warmup, total = settings.warmup_steps * updates_per_step, steps * updates_per_step
    peak, floor = settings.learning_rate, settings.final_fraction

    def rate(count: jax.Array | int) -> jax.Array:
        count = jnp.asarray(count, jnp.float32)
        risen = jnp.minimum((count + 1) / max(warmup, 1), 1.0)
        progress = jnp.clip((count - warmup) / max(total - warmup, 1), 0.0, 1.0)
        if settings.schedule == "linear":
            left = 1 - progress
        elif settings.schedule == "cosine":
            left = (1 + jnp.cos(jnp.pi * progress)) / 2
        else:
            return peak * risen
        return peak * risen * (floor + (1 - floor) * left)

    return rate
