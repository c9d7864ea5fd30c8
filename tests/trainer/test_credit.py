"""services.trainer.credit: the right advantage at the right tokens of the right trajectory."""

import numpy as np
import pytest

from headrace import config
from services.trainer.credit import Comparison, credited, penalised
from services.trainer.packing import Sample


def three_turns(number: int, rewards: tuple[float, float, float]) -> Sample:
    """Observation of two tokens, action of `number` + 1 tokens, three times."""
    turn = [False, False] + [True] * (number + 1)
    mask = np.array(turn * 3)
    ends = np.zeros(len(mask), bool)
    ends[len(turn) - 1 :: len(turn)] = True
    at_tokens = np.zeros(len(mask))
    at_tokens[ends] = rewards
    return Sample(
        trajectory_id=str(number),
        token_ids=np.ones(len(mask), np.int32),
        action_mask=mask,
        behaviour_logprobs=np.zeros(len(mask), np.float32),
        versions=np.zeros(len(mask), np.int64),
        rewards=at_tokens,
        turn_ends=ends,
    )


def by_token(sample: Sample) -> np.ndarray:
    return np.broadcast_to(sample.advantage, sample.action_mask.shape)[sample.action_mask]


def test_every_token_of_a_trajectory_has_its_trajectory_s_advantage():
    """The reward is the trajectory's number: a step-wise index shift would show (rivals.md, 41)."""
    samples = tuple(three_turns(number, (0, 0, float(number))) for number in range(4))
    for sample in credited([Comparison(samples, (True,) * 4)], config.Advantage(estimator="dr_grpo")):
        np.testing.assert_allclose(by_token(sample), int(sample.trajectory_id) - 1.5)


def test_a_turn_s_tokens_have_their_turn_s_advantage():
    samples = (three_turns(0, (1, 0, 0)), three_turns(1, (0, 0, 1)))
    settings = config.Advantage(estimator="dr_grpo", credit="turns")
    first, second = credited([Comparison(samples, (True, True))], settings)
    mean = 2 / 6
    np.testing.assert_allclose(by_token(first), [1 - 3 * mean, -2 * mean, -mean], atol=1e-6)
    np.testing.assert_allclose(by_token(second), np.repeat([1 - 3 * mean, 1 - 2 * mean, 1 - mean], 2), atol=1e-6)


def test_masked_tokens_do_not_move_later_turns():
    """A turn whose tokens are too old for the loss is still a turn."""
    whole = three_turns(1, (1, 2, 4))
    young = np.array(whole.action_mask)
    young[:4] = False
    cut = Sample(**{**vars(whole), "action_mask": young})
    settings = config.Advantage(estimator="dr_grpo", credit="turns")
    pair = (three_turns(0, (0, 0, 0)),)
    (_, of_whole), (_, of_cut) = (
        credited([Comparison((*pair, sample), (True, True))], settings) for sample in (whole, cut)
    )
    np.testing.assert_allclose(by_token(of_cut), by_token(of_whole)[2:])


def test_what_is_out_of_the_loss_is_compared_all_the_same():
    samples = tuple(three_turns(number, (0, 0, float(number))) for number in range(3))
    (kept,) = credited([Comparison(samples, (False, True, False))], config.Advantage(estimator="rloo"))
    assert (kept.trajectory_id, float(kept.advantage)) == ("1", 0.0)
    (kept,) = credited([Comparison(samples, (False, False, True))], config.Advantage(estimator="rloo"))
    assert float(kept.advantage) == pytest.approx(1.5)


def test_reinforce_plus_plus_compares_the_whole_minibatch():
    groups = [Comparison(tuple(three_turns(n, (0, 0, reward)) for n in range(2)), (True, True)) for reward in (0.0, 1)]
    samples = credited(groups, config.Advantage(estimator="reinforce_pp"))
    # 9 tokens of reward 0 and 9 of 1: groups of equal rewards, and yet a signal.
    expected = 0.5 / (np.sqrt(18 * 0.25 / 17) + 1e-6)
    assert [float(by_token(sample)[0]) for sample in samples] == pytest.approx([-expected] * 2 + [expected] * 2)
    baseline = credited(groups, config.Advantage(estimator="reinforce_pp_baseline"))
    assert not np.concatenate([by_token(sample) for sample in baseline]).any()


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_pp"])
def test_turns_without_a_formula_are_refused(estimator: str):
    with pytest.raises(ValueError, match="is not defined for"):
        config.Advantage(estimator=estimator, credit="turns")


def test_a_discount_without_turns_is_refused():
    with pytest.raises(ValueError, match="no effect"):
        config.Advantage(discount=0.9)


def test_a_divergence_comes_off_the_reward_at_its_own_token():
    samples = (three_turns(0, (0, 0, 1)), three_turns(1, (0, 0, 1)))
    divergences = [np.where(sample.action_mask, 0.25, np.nan) for sample in samples]
    shaped = penalised(Comparison(samples, (True, False)), divergences, coefficient=2.0)
    assert shaped.kept == (True, False)
    np.testing.assert_allclose(shaped.samples[0].rewards[samples[0].action_mask], [-0.5, -0.5, 0.5])
    assert [float(sample.rewards.sum()) for sample in shaped.samples] == [1 - 3 * 0.5, 1 - 6 * 0.5]
