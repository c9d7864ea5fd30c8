"""services.trainer.checkpoint on a real disk."""

import jax
import numpy as np
import pytest

from headrace.errors import StartupError
from services.trainer.checkpoint import Checkpoints, Notes
from services.trainer.stopwatch import Stopwatch
from tests.trainer import tiny


def notes(step):
    return Notes(
        step=step,
        cursor=7,
        positions={1: 0, 3: 1},
        learned_ids=["1-1", "2-0"],
        trained_groups=4,
    )


def trained(policy):
    policy.add([tiny.group(0)], Stopwatch())
    policy.update(Stopwatch())
    policy.end_step()
    return policy


def save(checkpoints, *arguments, **options):
    checkpoints.begin_save(*arguments, **options)
    checkpoints.settle()


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(left), jax.device_get(right))


def test_what_is_saved_comes_back_to_the_bit(tmp_path):
    learner = tiny.learner()
    policy, checkpoints = trained(tiny.policy(learner)), Checkpoints(tmp_path, keep=2)
    assert checkpoints.restore(policy.state, with_reference=False) is None
    save(checkpoints, policy.state, policy.state.parameters, notes(1))
    restored = Checkpoints(tmp_path, keep=2).restore(tiny.policy(learner, seed=1).state, with_reference=True)
    same(restored.state, policy.state)
    same(restored.reference, policy.state.parameters)
    assert restored.notes == notes(1)


def test_a_restored_policy_learns_as_the_saved_one(tmp_path):
    learner = tiny.learner()
    policy, checkpoints = trained(tiny.policy(learner)), Checkpoints(tmp_path, keep=2)
    save(checkpoints, policy.state, None, notes(1))
    again = tiny.policy(learner, seed=1)
    again.restart(checkpoints.restore(again.state, with_reference=False).state)
    same(trained(again).state, trained(policy).state)


def test_the_newest_are_kept_and_a_step_is_saved_once(tmp_path):
    policy, checkpoints = tiny.policy(tiny.learner()), Checkpoints(tmp_path, keep=2)
    for step in (0, 3, 3, 5):
        save(checkpoints, policy.state, None, notes(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "5"]
    assert checkpoints.newest_step == 5


def test_another_model_is_told(tmp_path):
    policy = tiny.policy(tiny.learner())
    save(Checkpoints(tmp_path, keep=1), policy.state, None, notes(1))
    other = jax.tree.map(lambda leaf: np.zeros((2, *leaf.shape), leaf.dtype), policy.state)
    with pytest.raises(StartupError, match=r"checkpoint 1 .* cannot be restored"):
        Checkpoints(tmp_path, keep=1).restore(other, with_reference=False)


def test_what_is_saved_is_what_was_there_when_the_save_began(tmp_path):
    """Training goes on, and consumes the arrays, while they are written."""
    learner = tiny.learner()
    policy, checkpoints = trained(tiny.policy(learner)), Checkpoints(tmp_path, keep=2)
    expected = jax.tree.map(np.array, jax.device_get(policy.state))
    for _ in range(5):
        checkpoints.begin_save(policy.state, None, notes(1))
        trained(policy)
    checkpoints.settle()
    same(checkpoints.restore(policy.state, with_reference=False).state, expected)


def test_the_best_are_kept_besides_the_newest(tmp_path):
    policy, checkpoints = tiny.policy(tiny.learner()), Checkpoints(tmp_path, keep=1, keep_best=1)
    for step, reward in ((1, 0.2), (2, 0.9), (3, 0.4), (4, 0.5)):
        save(checkpoints, policy.state, None, notes(step), reward=reward)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4"]
    assert checkpoints.newest_step == 4


def test_a_critic_is_a_part_of_it(tmp_path):
    policy, checkpoints = tiny.policy(tiny.learner()), Checkpoints(tmp_path, keep=1)
    save(checkpoints, policy.state, None, notes(1), critic=policy.state)
    restored = checkpoints.restore(policy.state, with_reference=False, critic=tiny.policy(tiny.learner(), seed=1).state)
    same(restored.critic, policy.state)
    with pytest.raises(StartupError, match="cannot be restored"):
        save(Checkpoints(tmp_path / "without", keep=1), policy.state, None, notes(1))
        Checkpoints(tmp_path / "without", keep=1).restore(policy.state, with_reference=False, critic=policy.state)
