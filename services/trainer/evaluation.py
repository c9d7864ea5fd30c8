"""Evaluation during training: the same held-out tasks every so many steps, on the engines that train, beside training.

Its tickets go the way of training tickets, marked, and are sampled at rollout.evaluation_temperature. They are counted
apart from what is outstanding, so they hold no training ticket back, and the trainer waits for them at the very end
only. While two evaluations of an environment are out, a further one is left out. What they tell is written down with
the versions that sampled them: generation goes on while weights change, so an evaluation may span versions.

A line of evaluation.jsonl is one evaluation of one environment.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from headrace import config
from headrace import trajectory as records
from headrace.v1 import trajectory_pb2 as pb
from services.trainer.feeder import Feeder
from services.trainer.journal import Journal
from services.trainer.status import Status

log = logging.getLogger(__name__)

_MOST_OUT = 2


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation of one environment told."""

    # Step after which it was asked for.
    step: int
    environment: str
    split: str
    # Tasks asked for, and episodes that ended as the environment ended them.
    tasks: int
    episodes: int
    # Episodes that told nothing: errors, and what a limit cut off before any reward.
    failed: int
    # Of the episodes; None where none ended.
    reward_mean: float | None
    # Versions that sampled them.
    oldest_version: int | None
    newest_version: int | None
    # k → probability that the best of k episodes of a task succeeds.
    pass_at: Mapping[int, float]
    # Whether every ticket came back.
    complete: bool


@dataclass
class _Asked:
    step: int
    environment: str
    waiting: set[str]
    tasks: int
    groups: list[pb.TrajectoryGroup] = field(default_factory=list)


class Evaluator:
    """Asks for evaluations and collects them."""

    def __init__(
        self,
        settings: config.Evaluation,
        *,
        environments: Sequence[str],
        feeder: Feeder,
        journal: Journal,
        status: Status,
        seed: int,
    ):
        """
        Args:
            environments: those that are evaluated.
            seed: of the tasks, the same at every evaluation.
        """
        self._settings, self._environments, self._feeder = settings, environments, feeder
        self._journal, self._status, self._seed = journal, status, seed
        self._asked: list[_Asked] = []
        self._known = {(line["step"], line["environment"]) for line in journal.read() if line["complete"]}

    @property
    def final_timeout_s(self) -> float:
        """How long the end of the run waits for what is out."""
        return self._settings.final_timeout_s

    async def begin(self) -> None:
        """Asks for an evaluation if one is due after the step that has just ended."""
        if self._status.step % self._settings.every_steps:
            return
        for environment in self._environments:
            out = self._out(environment)
            if len(out) >= _MOST_OUT:
                log.warning(
                    "no evaluation of step %d, %s: those of steps %s are still out",
                    self._status.step,
                    environment,
                    ", ".join(str(asked.step) for asked in out),
                )
            elif (self._status.step, environment) not in self._known:
                await self._ask(environment)

    @property
    def waiting(self) -> bool:
        """Whether a ticket is still out."""
        return any(self._out(environment) for environment in self._environments)

    def take(self, group: pb.TrajectoryGroup) -> bool:
        """Takes a group if it is of an evaluation that was asked for by this process."""
        for asked in self._asked:
            if group.task.task_id in asked.waiting:
                asked.groups.append(group)
                self.lose(group.task.task_id)
                return True
        return False

    def lose(self, task_id: str) -> None:
        """Waits no longer for a ticket; any other than an evaluation's is ignored."""
        self._feeder.evaluating.discard(task_id)
        for asked in [asked for asked in self._asked if task_id in asked.waiting]:
            asked.waiting.discard(task_id)
            if not asked.waiting:
                self._end(asked)

    def end(self) -> None:
        """Writes down what there is of every evaluation that is still out."""
        for asked in list(self._asked):
            self._end(asked)

    def _out(self, environment: str) -> list[_Asked]:
        """The environment's evaluations that are out. A Redis that lost its memory has lost their tickets."""
        for asked in [asked for asked in self._asked if not asked.waiting & self._feeder.evaluating]:
            self._end(asked)
        return [asked for asked in self._asked if asked.environment == environment]

    async def _ask(self, environment: str) -> None:
        drawn = np.random.default_rng((self._seed, 7))
        tasks = [
            pb.Task(
                environment=environment, split=self._settings.split, index=index, seed=int(drawn.integers(0, 2**63))
            )
            for index in range(self._settings.tasks)
        ]
        if await self._feeder.issue(tasks, purpose=pb.PURPOSE_EVALUATION, apart=True):
            waiting = {task.task_id for task in tasks}
            self._asked.append(_Asked(self._status.step, environment, waiting, len(tasks)))

    def _end(self, asked: _Asked) -> None:
        self._asked.remove(asked)
        self._feeder.evaluating.difference_update(asked.waiting)
        told = summary(asked.groups, asked.step, asked.environment, self._settings, tasks=asked.tasks)
        self._journal.append(asdict(told))
        self._status.evaluation_rewards[asked.environment] = math.nan if told.reward_mean is None else told.reward_mean
        log.info(
            "evaluation of step %d, %s: reward %s over %d episodes of %d tasks, %d failed",
            told.step,
            told.environment,
            "unknown" if told.reward_mean is None else f"{told.reward_mean:.3f}",
            told.episodes,
            told.tasks,
            told.failed,
        )


def summary(
    groups: Sequence[pb.TrajectoryGroup], step: int, environment: str, settings: config.Evaluation, *, tasks: int
) -> Evaluation:
    """What the groups of one evaluation tell together."""
    ended = [[episode for episode in group.trajectories if records.is_trainable(episode)] for group in groups]
    rewards = [[records.total_reward(episode) or 0.0 for episode in of_task] for of_task in ended]
    versions = [s.policy_version for of_task in ended for e in of_task for turn in e.turns for s in turn.version_spans]
    episodes = sum(map(len, ended))
    return Evaluation(
        step=step,
        environment=environment,
        split=settings.split,
        tasks=tasks,
        episodes=episodes,
        failed=sum(len(group.trajectories) for group in groups) - episodes,
        reward_mean=math.fsum(map(math.fsum, rewards)) / episodes if episodes else None,
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
        pass_at=pass_at([of_task for of_task in rewards if of_task], settings.success_reward),
        complete=len(groups) == tasks,
    )


def pass_at(rewards: Sequence[Sequence[float]], success_reward: float) -> dict[int, float]:
    """k → mean over tasks of 1 - C(n - c, k) / C(n, k), for k = 1, 2, 4, … that every task has episodes for.

    n episodes of a task, c of them with at least `success_reward`. https://arxiv.org/abs/2107.03374, equation 1
    """
    fewest = min(map(len, rewards), default=0)
    found = {}
    for k in (1 << power for power in range(fewest.bit_length())):
        successes = [(len(of_task), sum(reward >= success_reward for reward in of_task)) for of_task in rewards]
        found[k] = math.fsum(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in successes) / len(successes)
    return found
