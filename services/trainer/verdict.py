"""The verdict on one group: whether it can be true, and whether the step in progress can learn from it. Pure.

Shapes: G trajectories of a group that may enter the loss, T tokens of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from google.protobuf.message import DecodeError

from headrace import trajectory as records
from headrace.stream import GroupEntry
from headrace.trajectory import RecordError
from headrace.v1 import trajectory_pb2 as pb
from services.trainer.advantage import overlong_penalty
from services.trainer.credit import Comparison
from services.trainer.lineage import Lineage
from services.trainer.packing import Sample
from services.trainer.returns import LEFT_OVER, TOO_FEW_TRAINABLE, TOO_STALE
from services.trainer.task_order import sequence_number


@dataclass(frozen=True)
class Rules:
    """What a group is judged by."""

    run_id: str
    vocabulary_size: int
    environments: frozenset[str]
    max_row_tokens: int
    # Updates that may lie between the weights of the oldest token and the current ones.
    max_staleness: int
    # What becomes of truncated trajectories: as config.Loss says.
    truncated: Literal["keep", "mask", "penalise"]
    truncation_penalty: float
    # What becomes of tokens that are older than max_staleness: as config.Trainer says.
    stale: Literal["drop", "mask"] = "drop"
    # Overlong shaping, as config.Advantage says; the limit is rollout.max_episode_tokens.
    overlong_limit: int = 0
    overlong_buffer: int = 0
    overlong_penalty: float = 0.0
    # Degenerate groups that one step may give back.
    degenerate_returns: int = 0


@dataclass(frozen=True)
class LearnableGroup:
    """A group that enters the step in progress."""

    entry_id: str
    size_bytes: int
    gateway: str
    task: pb.Task
    # Its trainable trajectories, G of them.
    comparison: Comparison
    # Of the G trajectories, as the environment gave them.
    rewards: tuple[float, ...]
    # Whether all that is compared is equal, so that nothing tells one trajectory from another.
    degenerate: bool
    # Of the G trajectories.
    truncated: int
    oldest_version: int
    newest_version: int
    # Number of tokens in the loss by their age: updates between the weights that sampled them and the current ones.
    tokens_by_age: Mapping[int, int]
    # Tokens that were too old for the loss.
    stale_tokens: int = 0

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What enters the loss."""
        return self.comparison.kept_samples

    @property
    def age_max(self) -> int:
        """Age of its oldest token in the loss."""
        return max(self.tokens_by_age)

    @property
    def action_tokens(self) -> int:
        """Tokens that enter the loss."""
        return sum(self.tokens_by_age.values())


class Unfit(Exception):
    """A true group that this step cannot learn from."""

    def __init__(self, reason: str, detail: str):
        self.reason = reason
        super().__init__(detail)


def learnable(entry: GroupEntry, group: pb.TrajectoryGroup, rules: Rules, lineage: Lineage) -> LearnableGroup:
    """The group of an entry, which `parse` has found true, ready for the loss.

    Raises:
        Unfit: it is of no use now.
    """
    if group.task.purpose != pb.PURPOSE_TRAINING:
        raise Unfit(LEFT_OVER, "of a warm start that has ended")
    compared = [trajectory for trajectory in group.trajectories if records.is_trainable(trajectory)]
    kept = [number for number, trajectory in enumerate(compared) if not _is_masked(trajectory, rules)]
    if len(compared) < 2 or not kept:
        statuses = sorted({pb.EpisodeStatus.Name(trajectory.status) for trajectory in group.trajectories})
        raise Unfit(TOO_FEW_TRAINABLE, f"{len(compared)} trainable trajectories, {len(kept)} in the loss: {statuses}")
    samples = [_aged(to_sample(trajectory), trajectory, rules, lineage) for trajectory in compared]
    fresh = [_without_stale(sample, rules) for sample in samples]
    in_loss = tuple(number in kept and bool(fresh[number].action_mask.any()) for number in range(len(compared)))
    comparison = Comparison(tuple(fresh), in_loss)
    ages = np.concatenate([np.asarray(samples[number].ages)[samples[number].action_mask] for number in kept])
    if not any(in_loss) or (rules.stale == "drop" and ages.max() > rules.max_staleness):
        raise Unfit(
            TOO_STALE, f"its oldest token is {ages.max()} updates old, at most {rules.max_staleness} are allowed"
        )
    young = ages[ages <= rules.max_staleness]
    versions = np.concatenate([sample.versions[sample.action_mask] for sample in comparison.kept_samples])
    shaped = [np.asarray(sample.rewards) for sample in samples]
    return LearnableGroup(
        entry_id=entry.entry_id,
        size_bytes=len(entry.payload),
        gateway=group.gateway,
        task=group.task,
        comparison=comparison,
        rewards=tuple(_reward(trajectory) for trajectory in compared),
        degenerate=len({float(rewards.sum()) for rewards in shaped}) == 1,
        truncated=sum(trajectory.truncated for trajectory in compared),
        oldest_version=int(versions.min()),
        newest_version=int(versions.max()),
        tokens_by_age=dict(Counter(young.tolist())),
        stale_tokens=int(ages.size - young.size),
    )


def parse(entry: GroupEntry, rules: Rules, lineage: Lineage, *, cursor: int) -> pb.TrajectoryGroup:
    """The group of an entry.

    Args:
        cursor: number of the next ticket: all earlier ones have been issued.

    Raises:
        RecordError: it cannot be true.
    """
    try:
        group = pb.TrajectoryGroup.FromString(entry.payload)
    except DecodeError as error:
        raise RecordError("payload is no TrajectoryGroup") from error
    try:
        records.check_group(group, run_id=rules.run_id, vocabulary_size=rules.vocabulary_size)
    except OverflowError as error:
        raise RecordError("rewards sum to no finite number") from error
    if group.task.environment not in rules.environments:
        raise RecordError(f"task.environment {group.task.environment!r} is none of this run's")
    try:
        issued = sequence_number(group.task) < cursor
    except ValueError:
        issued = False
    if not issued:
        raise RecordError(f"task.task_id {group.task.task_id!r} was never issued")
    for number, trajectory in enumerate(group.trajectories):
        try:
            _check_for_loss(trajectory, rules, lineage)
        except (RecordError, ValueError) as error:
            raise RecordError(f"trajectories[{number}] {error}") from error
    return group


def to_sample(trajectory: pb.Trajectory) -> Sample:
    """The trajectory as the loss sees it, up to its last action."""
    token_ids, mask, logprobs, versions, ends = [], [], [], [], []
    length, early = 0, 0.0
    rewards: list[float] = []
    for turn in trajectory.turns:
        observed, acted = records.token_ids(turn.observation_token_ids), records.token_ids(turn.action_token_ids)
        sampled = records.logprobs(turn.action_logprobs)
        token_ids += [observed, acted]
        mask += [np.zeros(observed.size, bool), np.ones(acted.size, bool)]
        # A demonstration has neither logprobs nor versions.
        logprobs += [np.zeros(observed.size + acted.size - sampled.size, np.float32), sampled]
        sampled_by = records.versions(turn)
        versions += [np.full(observed.size + acted.size - sampled_by.size, -1, np.int64), sampled_by]
        length += observed.size + acted.size
        if acted.size:
            ends.append(length - 1)
            rewards.append(early if not rewards else 0.0)
        # A turn without an action gives its reward to the action before it, or to the first one.
        if rewards:
            rewards[-1] += turn.reward
        else:
            early += turn.reward
    masks = np.concatenate(mask)
    end = ends[-1] + 1
    at_tokens, turn_ends = np.zeros(end), np.zeros(end, bool)
    at_tokens[ends], turn_ends[ends] = rewards, True
    return Sample(
        trajectory_id=trajectory.trajectory_id,
        token_ids=np.concatenate(token_ids)[:end],
        action_mask=masks[:end],
        behaviour_logprobs=np.concatenate(logprobs)[:end],
        versions=np.concatenate(versions)[:end],
        rewards=at_tokens,
        turn_ends=turn_ends,
    )


def _check_for_loss(trajectory: pb.Trajectory, rules: Rules, lineage: Lineage) -> None:
    for turn in trajectory.turns:
        for span in turn.version_spans:
            lineage.age(span.policy_version)
    if not records.is_trainable(trajectory):
        return
    first = next(turn for turn in trajectory.turns if turn.observation_token_ids or turn.action_token_ids)
    if not first.observation_token_ids:
        raise RecordError("acts before it has observed anything")
    tokens = records.context_token_ids(trajectory.turns).size
    if tokens > rules.max_row_tokens:
        raise RecordError(f"has {tokens} tokens, more than trainer.max_row_tokens ({rules.max_row_tokens})")


def _is_masked(trajectory: pb.Trajectory, rules: Rules) -> bool:
    return trajectory.truncated and rules.truncated == "mask"


def _reward(trajectory: pb.Trajectory) -> float:
    reward = records.total_reward(trajectory)
    assert reward is not None, "a trainable trajectory has a reward"
    return reward


def _aged(sample: Sample, trajectory: pb.Trajectory, rules: Rules, lineage: Lineage) -> Sample:
    """With the age of each token, and with the reward that is compared."""
    spans = [(span.policy_version, span.length) for turn in trajectory.turns for span in turn.version_spans]
    ages = np.zeros(len(sample.action_mask), np.int64)
    ages[sample.action_mask] = np.repeat([lineage.age(version) for version, _ in spans], [n for _, n in spans])
    rewards = np.array(sample.rewards)
    if trajectory.truncated and rules.truncated == "penalise":
        rewards[-1] -= rules.truncation_penalty
    rewards[-1] -= overlong_penalty(
        len(sample.token_ids), limit=rules.overlong_limit, buffer=rules.overlong_buffer, penalty=rules.overlong_penalty
    )
    return replace(sample, ages=ages, rewards=rewards)


def _without_stale(sample: Sample, rules: Rules) -> Sample:
    """With the tokens that are too old out of the loss, where rules say so."""
    if rules.stale == "drop":
        return sample
    return replace(sample, action_mask=sample.action_mask & (np.asarray(sample.ages) <= rules.max_staleness))
