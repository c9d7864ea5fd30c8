"""Advantages against numbers worked out by hand."""

import numpy as np
import pytest

from services.trainer.advantage import group_advantages


def test_divides_by_the_standard_deviation_of_a_sample():
    # Mean 0.5, variance (0.25 + 0.25) / 1 = 0.5: plus and minus 0.5 / (0.7071 + 1e-6).
    np.testing.assert_allclose(group_advantages([1.0, 0.0]), [0.70710578, -0.70710578], rtol=1e-6)
    # Mean 1, variance (1 + 0 + 1 + 4 + 4) / 4 = 2.5.
    np.testing.assert_allclose(
        group_advantages([0, 1, 2, -1, 3]), np.array([-1, 0, 1, -2, 2]) / (np.sqrt(2.5) + 1e-6), rtol=1e-6
    )


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [0.1] * 8, [0.1] * 3, [1e9 + 0.1] * 6])
def test_equal_rewards_give_exactly_zero(rewards: list[float]):
    """The mean of three times 0.1 is not 0.1: taken from it, something is left."""
    assert not group_advantages(rewards).any()


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_a_group_of_one_is_refused(rewards: list[float]):
    with pytest.raises(ValueError, match="nothing to compare"):
        group_advantages(rewards)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(reward: float):
    with pytest.raises(ValueError, match="finite"):
        group_advantages([0.0, reward])
