"""The training loop.

    ┌─▶ wait for groups ─▶ accumulate, as they arrive ─▶ update     once a minibatch
    │   publish a new version ─▶ top up the tickets ─▶ report ─▶ commit when due
    └── until the last step, the wished-for reward or a signal

It waits for groups alone (that is the trainer's idle time); everything else it does itself. The device works in the
compute thread, so that the event loop can serve weights and health meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable

from headrace import config
from headrace.v1 import trainer_service_pb2 as pb
from services.trainer import machine, spans
from services.trainer.batcher import Batcher
from services.trainer.commit import Committer
from services.trainer.compute import ComputeThread
from services.trainer.evaluation import Evaluator
from services.trainer.feeder import Feeder
from services.trainer.guard import Guard
from services.trainer.ledger import Consumed, Ledger
from services.trainer.policy import Policy
from services.trainer.publisher import Publisher
from services.trainer.report import Reporter, step_report
from services.trainer.status import Status
from services.trainer.stopwatch import Stopwatch
from services.trainer.verdict import LearnableGroup

_GRACE_S = 10.0


class Interrupted(Exception):
    """The trainer was asked to stop in the middle of a step; it goes on from the last checkpoint."""


class Loop:
    """Steps, from wherever the run stands to its end."""

    def __init__(
        self,
        settings: config.Trainer,
        *,
        policy: Policy,
        feeder: Feeder,
        batcher: Batcher,
        ledger: Ledger,
        publisher: Publisher,
        committer: Committer,
        reporter: Reporter,
        status: Status,
        compute: ComputeThread,
        evaluator: Evaluator | None = None,
        recent_rewards: Iterable[float] = (),
    ):
        """`recent_rewards` are the mean rewards of the steps before, oldest first."""
        self._settings, self._policy, self._feeder, self._batcher = settings, policy, feeder, batcher
        self._ledger, self._publisher, self._committer, self._reporter = ledger, publisher, committer, reporter
        self._status, self._compute, self._evaluator = status, compute, evaluator
        self._guard = Guard(max_skipped_updates=settings.max_skipped_updates, updates_per_step=settings.minibatches)
        self._watch = Stopwatch()  # of the step in progress and of what came after the last report
        self._rewards = deque(recent_rewards, maxlen=settings.stop_window)

    async def run(self, stop: asyncio.Event) -> None:
        """Trains to the end of the run, or to a good place after `stop` is set, and makes the last step durable.

        Raises:
            Diverged: too many updates in a row were not finite.
            Interrupted: after `stop`, in the middle of a step whose groups did not come in time; the checkpoint before
                stands.
        """
        if not self.finished:
            await self._feeder.top_up()
        if self._evaluator:
            await self._evaluator.begin()
        self._watch = Stopwatch()
        while not self.finished and not stop.is_set():
            await self._step(stop)
        await self._committer.commit(reward=self._rewards[-1] if self._rewards else 0.0)
        await self._committer.settle()
        if self._evaluator and self.finished and not stop.is_set():
            await self._batcher.finish_evaluations(self._evaluator.final_timeout_s)

    @property
    def finished(self) -> bool:
        """Whether the run has reached its last step or the wished-for reward."""
        wished = self._settings.stop_at_reward
        full = len(self._rewards) == self._settings.stop_window
        return self._status.step >= self._settings.steps or (
            wished is not None and full and sum(self._rewards) / len(self._rewards) >= wished
        )

    async def _step(self, stop: asyncio.Event) -> None:
        watch, grace = self._watch, _Grace(stop)
        groups: list[LearnableGroup] = []
        self._batcher.begin_step()
        for _ in range(self._settings.minibatches):
            self._status.phase = pb.TRAINER_PHASE_WAITING
            async for arrived in self._batcher.groups(self._groups_per_minibatch, watch):
                await self._committer.settle(wait=False)
                groups += arrived
                self._ledger.take(group.entry_id for group in arrived)
                if not arrived and grace.is_over(self._policy):
                    if self._policy.between_steps:
                        return
                    raise Interrupted
                await self._compute(self._policy.add, [group.comparison for group in arrived], watch)
            self._status.phase = pb.TRAINER_PHASE_TRAINING
            await self._compute(self._policy.update, watch)
        measured = await self._compute(self._policy.end_step, self._status.step + 1)
        measured |= self._guard.watch(measured, step=self._status.step + 1)
        measured["flops_utilisation"] = machine.flops_utilisation(
            parameters=self._policy.size, tokens=int(measured["trained_tokens"]), seconds=watch.spent_s("compute")
        )
        self._status.step += 1
        self._status.trained_groups += len(groups)
        self._ledger.learn(
            self._status.step, [_consumed(group) for group in groups], policy_version=self._status.policy_version
        )
        with watch.measure("publishing"):
            await self._publisher.publish(self._policy.state.parameters)
        await self._feeder.top_up()
        if self._evaluator:
            await self._evaluator.begin()
        report = step_report(self._status, groups, measured, watch)
        spans.trained(groups, report)
        self._reporter.write(report)  # before the commit: a step that is never repeated must have been told
        self._rewards.append(report.reward_mean)
        self._watch = Stopwatch()
        with self._watch.measure("committing"):
            if self._committer.due:
                await self._committer.commit(reward=report.reward_mean)

    @property
    def _groups_per_minibatch(self) -> int:
        return self._settings.groups_per_step // self._settings.minibatches


class _Grace:
    """How long a step may still wait for groups once the trainer is asked to stop."""

    def __init__(self, stop: asyncio.Event):
        self._stop = stop
        self._deadline_s = math.inf

    def is_over(self, policy: Policy) -> bool:
        """Whether to give the step up: at once while it has changed nothing yet, else after a while."""
        if not self._stop.is_set():
            return False
        self._deadline_s = min(self._deadline_s, time.monotonic() + _GRACE_S)
        return policy.between_steps or time.monotonic() > self._deadline_s


def _consumed(group: LearnableGroup) -> Consumed:
    return Consumed(
        entry_id=group.entry_id,
        task_id=group.task.task_id,
        size_bytes=group.size_bytes,
        oldest_version=group.oldest_version,
        newest_version=group.newest_version,
        age_max=group.age_max,
    )
