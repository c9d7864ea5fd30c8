"""Learning rates worked out by hand, and which parameters decay."""

import jax.numpy as jnp
import numpy as np
import pytest

from headrace import config
from services.trainer import optimizer


def rates(updates: list[int], *, steps: int = 10, updates_per_step: int = 1, **settings: object) -> list[float]:
    made = config.Optimizer.model_validate({"learning_rate": 1.0, **settings})
    rate = optimizer.schedule(made, steps=steps, updates_per_step=updates_per_step)
    return [round(float(rate(update)), 6) for update in updates]


def test_constant():
    assert rates([0, 5, 9, 20]) == [1, 1, 1, 1]


def test_warm_up_counts_steps_and_never_wastes_an_update_at_zero():
    assert rates([0, 1, 2, 3, 4], warmup_steps=2, updates_per_step=2) == [0.25, 0.5, 0.75, 1, 1]


def test_linear_decay_spans_what_warm_up_leaves():
    assert rates([0, 1, 2, 6, 10, 50], schedule="linear", warmup_steps=2) == [0.5, 1, 1, 0.5, 0, 0]
    assert rates([2, 6, 10], schedule="linear", warmup_steps=2, final_fraction=0.2) == [1, 0.6, 0.2]


def test_cosine_decay():
    assert rates([0, 5, 10, 11], schedule="cosine") == [1, 0.5, 0, 0]
    assert rates([5, 10], schedule="cosine", final_fraction=0.5) == [0.75, 0.5]


def test_decay_spares_norms_and_biases():
    adamw = optimizer.create(config.Optimizer(learning_rate=0.1, weight_decay=0.5), steps=1)
    parameters = {"matrix": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    nothing = {"matrix": jnp.zeros((2, 2)), "norm": jnp.zeros(2)}
    changes, _ = adamw.update(nothing, adamw.init(parameters), parameters)
    np.testing.assert_allclose(changes["matrix"], np.full((2, 2), -0.05), rtol=1e-6)
    assert not changes["norm"].any()


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_gradients_are_clipped_by_their_common_norm(scale: float):
    # (3, 4) has norm 5, clipped to 1: (0.6, 0.8). Adam's first change is g / (|g| + epsilon).
    adamw = optimizer.create(config.Optimizer(learning_rate=1.0, epsilon=1.0), steps=1)
    parameters = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    gradients = {"a": jnp.array([3.0 * scale]), "b": jnp.array([4.0 * scale])}
    changes, _ = adamw.update(gradients, adamw.init(parameters), parameters)
    np.testing.assert_allclose([*changes["a"], *changes["b"]], [-0.6 / 1.6, -0.8 / 1.8], rtol=1e-5)
