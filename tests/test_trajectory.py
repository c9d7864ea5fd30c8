"""headrace.trajectory: arrays survive the wire, and records that cannot be true are refused by field."""

import numpy as np
import pytest

from headrace import trajectory as records
from headrace.v1 import trajectory_pb2 as pb


def turn(**changes) -> pb.Turn:
    values = {
        "observation_token_ids": records.to_bytes([1, 2, 3], records.INT32),
        "action_token_ids": records.to_bytes([4, 5], records.INT32),
        "action_logprobs": records.to_bytes([-0.5, -1.25], records.FLOAT32),
        "version_spans": [pb.VersionSpan(policy_version=3, length=2)],
        "reward": 0.0,
        "finish_reason": pb.FINISH_REASON_STOP,
    }
    return pb.Turn(**{**values, **changes})


def trajectory(*turns, **changes) -> pb.Trajectory:
    values = {
        "trajectory_id": "t",
        "turns": turns or [turn()],
        "terminated": True,
        "status": pb.EPISODE_STATUS_COMPLETED,
    }
    return pb.Trajectory(**{**values, **changes})


def group(*trajectories) -> pb.TrajectoryGroup:
    task = pb.Task(task_id="0", environment="e", split="train", purpose=pb.PURPOSE_TRAINING)
    return pb.TrajectoryGroup(task=task, trajectories=trajectories or [trajectory()], run_id="run")


def check(value: pb.TrajectoryGroup) -> None:
    records.check_group(value, run_id="run", vocabulary_size=10)


def test_arrays_survive_the_wire():
    assert records.token_ids(records.to_bytes([1, 2**31 - 1], records.INT32)).tolist() == [1, 2**31 - 1]
    assert records.logprobs(records.to_bytes([-0.5], records.FLOAT32)).tolist() == [-0.5]
    assert records.to_bytes([1], records.INT32) == b"\x01\x00\x00\x00"
    with pytest.raises(records.RecordError, match="multiple of 4"):
        records.token_ids(b"123")


def test_versions_and_spans_are_inverse():
    spans = records.version_spans([3, 3, 4])
    assert [(span.policy_version, span.length) for span in spans] == [(3, 2), (4, 1)]
    assert records.versions(pb.Turn(version_spans=spans)).tolist() == [3, 3, 4]
    assert records.versions(pb.Turn()).tolist() == []


def test_context_is_the_concatenation_of_turns():
    assert records.context_token_ids([turn(), turn()]).tolist() == [1, 2, 3, 4, 5] * 2
    assert records.context_token_ids([]).dtype == np.int32


def test_zero_reward_differs_from_none():
    assert records.total_reward(trajectory(turn(reward=0.0))) == 0.0
    assert records.total_reward(trajectory(turn(reward=None))) is None
    assert records.total_reward(trajectory(turn(reward=None), turn(reward=0.5), turn(reward=0.25))) == 0.75


def test_oldest_version_ignores_what_is_not_trained():
    old = trajectory(
        turn(version_spans=[pb.VersionSpan(policy_version=1, length=2)]), status=pb.EPISODE_STATUS_ENGINE_ERROR
    )
    assert records.oldest_version(group(old)) is None
    assert records.oldest_version(group(old, trajectory())) == 3


def test_a_true_record_passes():
    check(group())
    check(group(trajectory(), trajectory(trajectory_id="u", status=pb.EPISODE_STATUS_ENVIRONMENT_ERROR, turns=[])))
    check(group(trajectory(status=pb.EPISODE_STATUS_TRUNCATED_TURNS, terminated=False, truncated=True)))


def test_what_a_limit_cut_off_before_any_reward_is_true_but_not_trainable():
    for turns in ([turn(reward=None)], []):
        cut = trajectory(terminated=False, truncated=True, status=pb.EPISODE_STATUS_TRUNCATED_TOKENS)
        del cut.turns[:]
        cut.turns.extend(turns)
        check(group(cut))
        assert not records.is_trainable(cut)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        (turn(reward=float("nan")), "reward is nan"),
        (turn(reward=float("inf")), "reward is inf"),
        (turn(reward=None), "no reward"),
        (turn(action_logprobs=b""), "0 values for 2"),
        (turn(action_logprobs=records.to_bytes([0.5, -1], records.FLOAT32)), "no log-probability"),
        (turn(action_logprobs=records.to_bytes([float("nan"), -1], records.FLOAT32)), "no log-probability"),
        (turn(action_token_ids=records.to_bytes([4, 10], records.INT32)), "outside 0..9"),
        (turn(observation_token_ids=records.to_bytes([-1], records.INT32)), "outside 0..9"),
        (turn(observation_token_ids=b"123"), "multiple of 4"),
        (turn(version_spans=[]), "covers 0 of 2"),
        (turn(version_spans=[pb.VersionSpan(policy_version=-1, length=2)]), "negative version"),
        (turn(finish_reason=0), "finish_reason"),
        (turn(action_token_ids=b"", action_logprobs=b"", version_spans=[]), "no action"),
    ],
)
def test_impossible_turns_are_refused_by_field(changed, word):
    with pytest.raises(records.RecordError, match=word):
        check(group(trajectory(changed)))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"status": 0}, "status is 0"),
        ({"trajectory_id": ""}, "trajectory_id"),
        ({"truncated": True}, "exactly one"),
        ({"terminated": False}, "exactly one"),
        ({"terminated": False, "truncated": True}, "terminated is False"),
    ],
)
def test_impossible_trajectories_are_refused(changes, word):
    with pytest.raises(records.RecordError, match=word):
        check(group(trajectory(**changes)))


def test_impossible_groups_are_refused():
    for changed, word in (
        (pb.TrajectoryGroup(task=group().task, run_id="other"), "run_id"),
        (pb.TrajectoryGroup(task=group().task, run_id="run"), "trajectories is empty"),
        (pb.TrajectoryGroup(run_id="run"), "task_id is empty"),
        (group(trajectory(), trajectory()), "repeated"),
    ):
        with pytest.raises(records.RecordError, match=word):
            check(changed)


def test_a_demonstration_carries_no_logprobs():
    demonstration = group(trajectory(turn(action_logprobs=b"", version_spans=[])))
    demonstration.task.purpose = pb.PURPOSE_DEMONSTRATION
    check(demonstration)
    demonstration.trajectories[0].turns[0].CopyFrom(turn())
    with pytest.raises(records.RecordError, match="demonstration"):
        check(demonstration)
