"""What a step tells: a line of metrics.jsonl, and TensorBoard."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from services.trainer import exposition
from services.trainer.journal import Journal
from services.trainer.status import Status
from services.trainer.stopwatch import Stopwatch
from services.trainer.verdict import LearnableGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReport:
    """One step, as it is written down. Times are wall seconds."""

    step: int
    # The version that the step published.
    policy_version: int
    # When it was done, seconds since the epoch.
    time_s: float
    step_s: float
    waiting_s: float
    packing_s: float
    compute_s: float
    publishing_s: float
    # For the checkpoint of the step before, if there was one.
    committing_s: float
    # Share of step_s spent waiting for groups.
    idle_fraction: float
    reward_mean: float
    reward_mean_by_environment: Mapping[str, float]
    groups: int
    # Share of the groups whose rewards are all equal.
    degenerate_fraction: float
    trajectories: int
    truncated_fraction: float
    action_tokens: int
    trajectories_per_s: float
    action_tokens_per_s: float
    # Ages of the trained tokens, in updates.
    staleness_mean: float
    staleness_max: int
    # Share of the trained tokens by age.
    staleness_shares: Mapping[int, float]
    # Tokens that were too old for the loss, by environment.
    stale_tokens_by_environment: Mapping[str, int]
    outstanding_tickets: int
    # Since the run began, by reason.
    returned_groups: Mapping[str, int]
    # What the loss and the optimizer measured, by name.
    measured: Mapping[str, float]

    def scalars(self) -> dict[str, float]:
        """Every number by name."""
        fields = {**vars(self)}
        by_environment, ages, stale, returned, measured = (
            fields.pop(name)
            for name in (
                "reward_mean_by_environment",
                "staleness_shares",
                "stale_tokens_by_environment",
                "returned_groups",
                "measured",
            )
        )
        return {
            **fields,
            **{f"reward_mean/{name}": value for name, value in by_environment.items()},
            **{f"staleness_share/{age}": share for age, share in ages.items()},
            **{f"stale_tokens/{name}": value for name, value in stale.items()},
            **{f"returned_groups/{name}": value for name, value in returned.items()},
            **measured,
        }


def step_report(
    status: Status, groups: Sequence[LearnableGroup], measured: Mapping[str, float], watch: Stopwatch
) -> StepReport:
    """The report of a step that has just ended, which `status` tells from now on too."""
    rewards = [reward for group in groups for reward in group.rewards]
    by_environment: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        by_environment[group.task.environment] += group.rewards
    stale: defaultdict[str, int] = defaultdict(int)
    for group in groups:
        stale[group.task.environment] += group.stale_tokens
    tokens = sum(group.action_tokens for group in groups)
    step_s = watch.total_s
    status.reward_mean = _mean(rewards)
    status.idle_fraction = watch.spent_s("waiting") / step_s
    by_age: Counter[int] = Counter()
    for group in groups:
        by_age.update(group.tokens_by_age)
    status.staleness_mean = sum(age * count for age, count in by_age.items()) / tokens
    status.staleness_max = max(by_age)
    return StepReport(
        step=status.step,
        policy_version=status.policy_version,
        time_s=time.time(),
        step_s=step_s,
        waiting_s=watch.spent_s("waiting"),
        packing_s=watch.spent_s("packing"),
        compute_s=watch.spent_s("compute"),
        publishing_s=watch.spent_s("publishing"),
        committing_s=watch.spent_s("committing"),
        idle_fraction=status.idle_fraction,
        reward_mean=status.reward_mean,
        reward_mean_by_environment={name: _mean(values) for name, values in by_environment.items()},
        groups=len(groups),
        degenerate_fraction=_mean([group.degenerate for group in groups]),
        trajectories=len(rewards),
        truncated_fraction=sum(group.truncated for group in groups) / len(rewards),
        action_tokens=tokens,
        trajectories_per_s=len(rewards) / step_s,
        action_tokens_per_s=tokens / step_s,
        staleness_mean=status.staleness_mean,
        staleness_max=status.staleness_max,
        staleness_shares={age: count / tokens for age, count in sorted(by_age.items())},
        stale_tokens_by_environment=stale,
        outstanding_tickets=status.outstanding_tickets,
        returned_groups=status.returned_by_reason(),
        measured=measured,
    )


class Reporter:
    """Writes reports down, after those of the steps before."""

    def __init__(self, journal: Journal, *, tensorboard: Path | None, first_step: int):
        """`tensorboard` is the folder of its events; `first_step` is the step that comes next."""
        self._journal = journal
        self._board = SummaryWriter(str(tensorboard), purge_step=first_step) if tensorboard else None

    def write(self, report: StepReport) -> None:
        """Adds a line and the curves' next points."""
        scalars = report.scalars()
        exposition.count(report)
        self._journal.append({name: _plain(value) for name, value in scalars.items()})
        if self._board:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, report.step)
            self._board.flush()
        log.info(
            "step %d: reward %.3f, staleness %.2f (max %d), idle %.0f %%, %.0f tokens/s",
            report.step,
            report.reward_mean,
            report.staleness_mean,
            report.staleness_max,
            100 * report.idle_fraction,
            report.action_tokens_per_s,
        )

    def close(self) -> None:
        """Closes the files."""
        if self._board:
            self._board.close()


def _plain(value: float) -> Any:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
