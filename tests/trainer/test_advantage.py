"""Advantages against numbers worked out by hand."""

import numpy as np
import pytest

from services.trainer.advantage import (
    generalised_advantages,
    group_advantages,
    normalise,
    overlong_penalty,
    turn_advantages,
)


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


def test_baselines_by_hand():
    rewards = [0.0, 1.0, 2.0, 5.0]
    np.testing.assert_allclose(group_advantages(rewards, "dr_grpo"), [-2, -1, 0, 3])
    # Each against the mean of the other three: 8/3, 7/3, 2, 1.
    np.testing.assert_allclose(group_advantages(rewards, "rloo"), [-8 / 3, -4 / 3, 0, 4], rtol=1e-6)
    np.testing.assert_allclose(group_advantages(rewards, "reinforce_pp"), rewards)
    np.testing.assert_allclose(group_advantages(rewards, "reinforce_pp_baseline"), [-2, -1, 0, 3])


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_equal_rewards_are_zero_by_every_baseline(estimator: str):
    assert not group_advantages([0.1] * 7, estimator).any()


def test_turns_by_hand():
    # All rewards: 0, 1, 2, 1; mean 1, std sqrt(2/3). The first trajectory: -1, 0; the second: 1, 0.
    rewards = [np.array([0.0, 1.0]), np.array([2.0, 1.0])]
    first, second = turn_advantages(rewards, "dr_grpo", discount=0.5)
    np.testing.assert_allclose(first, [-1, 0])
    np.testing.assert_allclose(second, [1, 0])
    later, _ = turn_advantages([np.array([1.0, 0.0, 3.0]), np.array([0.0])], "dr_grpo", discount=0.5)
    # Mean 1: 0, -1, 2. To go: 0 + 0.5 (-1 + 0.5 * 2), -1 + 0.5 * 2, 2.
    np.testing.assert_allclose(later, [0, 0, 2])
    scaled, _ = turn_advantages(rewards, "grpo")
    np.testing.assert_allclose(scaled, np.array([-1, 0]) / (np.sqrt(2 / 3) + 1e-6), rtol=1e-6)


def test_turns_of_equal_rewards_are_exactly_zero():
    advantages = turn_advantages([np.array([0.1, 0.1]), np.array([0.1])], "grpo")
    assert [len(of_one) for of_one in advantages] == [2, 1]
    assert not np.concatenate(advantages).any()


def test_gae_by_hand_over_two_turns():
    # Tokens: observation, action, action | observation, action. Rewards at the ends of turns.
    mask = np.array([False, True, True, False, True])
    ends = np.array([False, False, True, False, True])
    rewards, values = np.array([0.0, 0, 1, 0, 2]), np.array([9.0, 0.5, 0.25, 9.0, 1.0])
    advantages, returns = generalised_advantages(rewards, values, mask, ends, discount=0.5, trace=0.8)
    last = 2 - 1.0
    middle = 1 + 0.5 * 1.0 - 0.25 + 0.5 * 0.8 * last
    first = 0.25 - 0.5 + 0.8 * middle
    np.testing.assert_allclose(advantages, [0, first, middle, 0, last], rtol=1e-6)
    np.testing.assert_allclose(returns, [0, first + 0.5, middle + 0.25, 0, last + 1.0], rtol=1e-6)


def test_gae_with_a_trace_of_one_is_the_return_less_the_value():
    rng = np.random.default_rng(0)
    mask, rewards, values = np.ones(6, bool), rng.normal(size=6), rng.normal(size=6)
    advantages, returns = generalised_advantages(rewards, values, mask, np.zeros(6, bool), trace=1.0)
    np.testing.assert_allclose(returns, np.cumsum(rewards[::-1])[::-1], rtol=1e-5)
    np.testing.assert_allclose(advantages, np.cumsum(rewards[::-1])[::-1] - values, rtol=1e-5)


def test_normalises_over_every_token_of_the_minibatch():
    masks = [np.array([True, True, False]), np.array([True])]
    first, second = normalise([np.array([1.0, 1.0, 99.0]), np.array([4.0])], masks)
    # 1, 1, 4: mean 2, std sqrt(3).
    np.testing.assert_allclose([*first, *second], np.array([-1, -1, 0, 2]) / (np.sqrt(3) + 1e-6) * [1, 1, 0, 1])
    assert not np.concatenate(normalise([np.full(2, 0.1)], [np.ones(2, bool)])).any()
    assert normalise([], []) == []


@pytest.mark.parametrize(("tokens", "lost"), [(10, 0), (80, 0), (90, 0.5), (100, 1), (120, 1)])
def test_a_long_episode_loses_reward_evenly(tokens: int, lost: float):
    assert overlong_penalty(tokens, limit=100, buffer=20, penalty=1.0) == pytest.approx(lost)
    assert overlong_penalty(tokens, limit=100, buffer=0, penalty=1.0) == 0
