"""What a record implies: arrays in and out of their bytes, what may be trained on, and whether a record can be true.

Pure: protos in, values out. `check_group` is the border check of every entry that comes from Redis.

Shapes: O observation tokens, A action tokens of one turn, T tokens of a trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from headrace import images
from headrace.v1 import trajectory_pb2 as pb

INT32 = np.dtype("<i4")
FLOAT32 = np.dtype("<f4")

TRAINABLE = frozenset(
    {
        pb.EPISODE_STATUS_COMPLETED,
        pb.EPISODE_STATUS_TRUNCATED_TURNS,
        pb.EPISODE_STATUS_TRUNCATED_TOKENS,
        pb.EPISODE_STATUS_TRUNCATED_TIME,
    }
)


class RecordError(ValueError):
    """A record that cannot be true; the message names the field."""


def to_bytes(values: Sequence[int] | Sequence[float] | np.ndarray, dtype: np.dtype) -> bytes:
    """The wire form of an array."""
    return np.asarray(values, dtype=dtype).tobytes()


def token_ids(data: bytes) -> np.ndarray:
    """int32[n] of a token id field. Raises RecordError when the bytes are no whole number of them."""
    return _array(data, INT32)


def logprobs(data: bytes) -> np.ndarray:
    """float32[n] of a logprob field. Raises RecordError when the bytes are no whole number of them."""
    return _array(data, FLOAT32)


def versions(turn: pb.Turn) -> np.ndarray:
    """int64[A]: the policy_version of each action token."""
    spans = turn.version_spans
    return np.repeat(
        np.array([span.policy_version for span in spans], np.int64), np.array([span.length for span in spans], np.int64)
    )


def version_spans(token_versions: Iterable[int]) -> list[pb.VersionSpan]:
    """The spans of a list of versions, one a token."""
    spans: list[pb.VersionSpan] = []
    for version in token_versions:
        if spans and spans[-1].policy_version == version:
            spans[-1].length += 1
        else:
            spans.append(pb.VersionSpan(policy_version=version, length=1))
    return spans


def context_token_ids(turns: Iterable[pb.Turn]) -> np.ndarray:
    """int32[T]: every token of the episode in order, observations and actions."""
    parts = [token_ids(part) for turn in turns for part in (turn.observation_token_ids, turn.action_token_ids)]
    return np.concatenate(parts) if parts else np.empty(0, INT32)


def is_trainable(trajectory: pb.Trajectory) -> bool:
    """Whether the trajectory may enter a loss: no infrastructure failed, it sampled something and somebody judged it.

    An episode that a limit cut off before any reward was given is true but tells nothing: it is never a reward of 0.
    """
    return (
        trajectory.status in TRAINABLE
        and any(turn.action_token_ids for turn in trajectory.turns)
        and total_reward(trajectory) is not None
    )


def total_reward(trajectory: pb.Trajectory) -> float | None:
    """Sum of the turns' rewards; None when no turn has one."""
    rewards = [turn.reward for turn in trajectory.turns if turn.HasField("reward")]
    return math.fsum(rewards) if rewards else None


def oldest_version(group: pb.TrajectoryGroup) -> int | None:
    """Version of the oldest action token in the group's trainable trajectories; None when there is none."""
    return min(
        (
            span.policy_version
            for trajectory in group.trajectories
            if is_trainable(trajectory)
            for turn in trajectory.turns
            for span in turn.version_spans
        ),
        default=None,
    )


def check_group(group: pb.TrajectoryGroup, *, run_id: str, vocabulary_size: int) -> None:
    """Raises RecordError, naming the field and what is wrong with it, unless the group can be true."""
    if group.run_id != run_id:
        raise RecordError(f"run_id is {group.run_id!r}, but this run is {run_id!r}")
    check_task(group.task)
    if not group.trajectories:
        raise RecordError("trajectories is empty")
    seen = set()
    for number, trajectory in enumerate(group.trajectories):
        if not trajectory.trajectory_id or trajectory.trajectory_id in seen:
            raise RecordError(f"trajectories[{number}].trajectory_id {trajectory.trajectory_id!r} is empty or repeated")
        seen.add(trajectory.trajectory_id)
        try:
            check_trajectory(trajectory, purpose=group.task.purpose, vocabulary_size=vocabulary_size)
        except RecordError as error:
            raise RecordError(f"trajectories[{number}].{error}") from error


def check_task(task: pb.Task) -> None:
    """Raises RecordError unless the task names what to run."""
    for field in ("task_id", "environment", "split"):
        if not getattr(task, field):
            raise RecordError(f"task.{field} is empty")
    if task.purpose not in (pb.PURPOSE_TRAINING, pb.PURPOSE_EVALUATION, pb.PURPOSE_DEMONSTRATION):
        raise RecordError(f"task.purpose is {task.purpose}")


def check_trajectory(trajectory: pb.Trajectory, *, purpose: int, vocabulary_size: int) -> None:
    """Raises RecordError unless the trajectory can be true.

    A trajectory that its task ended must have a turn with an action and a finite reward: an episode that nobody judged
    is no training data. One that a limit cut off may lack both; then it is not trainable.
    """
    if trajectory.status not in pb.EpisodeStatus.values() or trajectory.status == pb.EPISODE_STATUS_UNSPECIFIED:
        raise RecordError(f"status is {trajectory.status}")
    for number, turn in enumerate(trajectory.turns):
        try:
            _check_turn(turn, purpose=purpose, vocabulary_size=vocabulary_size)
        except RecordError as error:
            raise RecordError(f"turns[{number}].{error}") from error
    for number, message in enumerate(trajectory.messages):
        try:
            images.check(message)
        except images.ImageError as error:
            raise RecordError(f"messages[{number}]: {error}") from error
    if trajectory.status not in TRAINABLE:
        return
    if trajectory.terminated == trajectory.truncated:
        raise RecordError("exactly one of terminated and truncated must be set once an episode has ended")
    if trajectory.terminated != (trajectory.status == pb.EPISODE_STATUS_COMPLETED):
        raise RecordError(f"terminated is {trajectory.terminated} with status {trajectory.status}")
    if trajectory.status != pb.EPISODE_STATUS_COMPLETED:
        return
    if not any(turn.action_token_ids for turn in trajectory.turns):
        raise RecordError("turns hold no action")
    if total_reward(trajectory) is None:
        raise RecordError("turns hold no reward: an environment must give at least one before an episode ends")


def _check_turn(turn: pb.Turn, *, purpose: int, vocabulary_size: int) -> None:
    for field in ("observation_token_ids", "action_token_ids"):
        ids = token_ids_of(turn, field)
        if ids.size and (ids.min() < 0 or ids.max() >= vocabulary_size):
            raise RecordError(f"{field} holds ids outside 0..{vocabulary_size - 1}")
    actions = len(turn.action_token_ids) // INT32.itemsize
    if turn.HasField("reward") and not math.isfinite(turn.reward):
        raise RecordError(f"reward is {turn.reward}")
    if purpose == pb.PURPOSE_DEMONSTRATION:
        if turn.action_logprobs or turn.version_spans:
            raise RecordError("action_logprobs and version_spans must be empty in a demonstration")
        return
    values = logprobs(turn.action_logprobs)
    if values.size != actions:
        raise RecordError(f"action_logprobs has {values.size} values for {actions} action tokens")
    if not np.isfinite(values).all() or (values > 1e-3).any():
        raise RecordError("action_logprobs holds a value that is no log-probability")
    if any(span.length < 1 or span.policy_version < 0 for span in turn.version_spans):
        raise RecordError("version_spans holds an empty span or a negative version")
    covered = sum(span.length for span in turn.version_spans)
    if covered != actions:
        raise RecordError(f"version_spans covers {covered} of {actions} action tokens")
    if actions and turn.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
        raise RecordError("finish_reason is not set")


def token_ids_of(turn: pb.Turn, field: str) -> np.ndarray:
    """int32[n] of a named field of a turn; the error names the field."""
    try:
        return token_ids(getattr(turn, field))
    except RecordError as error:
        raise RecordError(f"{field} {error}") from error


def _array(data: bytes, dtype: np.dtype) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise RecordError(f"has {len(data)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)
