"""Supervised start: the policy imitates an environment's demonstrations until its own episodes earn enough.

    demonstration tickets ──▶ gateways let the environment's expert act ──▶ groups of one episode each
    every few updates: publish ──▶ evaluation tickets ──▶ mean sampled reward ──▶ enough? the end

It stops early on purpose: a policy that imitates perfectly samples the same episode again and again, and reinforcement
learning finds nothing to compare. Its state is not saved before its end; a trainer that is killed begins it again, and
groups of the attempt before are recognised by their ticket numbers, dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import jax
import numpy as np

from headrace import config
from headrace import trajectory as records
from headrace.stream import GroupEntry
from headrace.trajectory import RecordError
from headrace.v1 import trajectory_pb2 as pb
from services.trainer.compute import ComputeThread
from services.trainer.feeder import Feeder
from services.trainer.inbox import Inbox
from services.trainer.lineage import Lineage
from services.trainer.loop import Interrupted
from services.trainer.packing import Sample, pack
from services.trainer.patience import Patience
from services.trainer.publisher import Publisher
from services.trainer.returns import LEFT_OVER, MALFORMED, TOO_FEW_TRAINABLE, Returns
from services.trainer.task_order import TaskOrder, sequence_number
from services.trainer.train import Learner, TrainState
from services.trainer.verdict import Rules, parse, to_sample

log = logging.getLogger(__name__)

_BLOCK_S = 1.0
_BATCH_OF_ENTRIES = 64


class Collector:
    """Issues tickets of one purpose and gathers as many good groups."""

    def __init__(
        self, *, inbox: Inbox, feeder: Feeder, order: TaskOrder, lineage: Lineage, returns: Returns, rules: Rules
    ):
        self._inbox, self._feeder, self._order = inbox, feeder, order
        self._lineage, self._returns, self._rules = lineage, returns, rules

    async def collect(self, purpose: int, count: int, stop: asyncio.Event) -> list[pb.TrajectoryGroup]:
        """`count` groups that hold at least one trainable trajectory each; a ticket that fails is replaced.

        Raises:
            Interrupted: `stop` was set.
        """
        first, groups, patience = self._feeder.cursor, list[pb.TrajectoryGroup](), Patience()
        await self._issue(purpose, count)
        while len(groups) < count:
            if stop.is_set():
                raise Interrupted
            entries = await self._inbox.read(_BATCH_OF_ENTRIES, _BLOCK_S)
            good, failed = await self._judge(entries, purpose, first)
            groups += good
            if good:
                patience.succeeded()
            await patience.failed(failed)
            # Silence: a Redis that lost its memory has tickets to be told again.
            lost = 0 if entries else count - len(groups) - await self._feeder.outstanding()
            await self._issue(purpose, max(failed, lost))
        return groups

    async def _issue(self, purpose: int, count: int) -> None:
        tasks = [self._order.task(self._feeder.cursor + number) for number in range(count)]
        await self._feeder.issue(tasks, purpose=purpose)

    async def _judge(
        self, entries: Sequence[GroupEntry], purpose: int, first: int
    ) -> tuple[list[pb.TrajectoryGroup], int]:
        """The good groups among those that have arrived, and the number of tickets to replace."""
        good, failed = [], 0
        for entry in entries:
            try:
                group = parse(entry, self._rules, self._lineage, cursor=self._feeder.cursor)
            except RecordError as error:
                log.warning("group %s is malformed and goes to the dead-letter stream: %s", entry.entry_id, error)
                self._returns.record(entry, MALFORMED, str(error))
                await self._inbox.dead_letter(entry, str(error))
                failed += 1
                continue
            if group.task.purpose != purpose or sequence_number(group.task) < first:
                self._returns.record(entry, LEFT_OVER, "of an attempt before this one")
            elif not _trainable(group):
                self._returns.record(entry, TOO_FEW_TRAINABLE, "no trainable episode")
                failed += 1
            else:
                good.append(group)
            await self._inbox.acknowledge([entry.entry_id])
        return good, failed


async def warm_start(
    settings: config.WarmStart,
    collector: Collector,
    *,
    learner: Learner,
    state: TrainState,
    publisher: Publisher,
    compute: ComputeThread,
    group_size: int,
    max_row_tokens: int,
    buckets: tuple[int, ...],
    seed: int,
    stop: asyncio.Event,
) -> TrainState:
    """The state after imitation; its parameters are published.

    Args:
        learner: with the warm start's own optimizer.
        group_size: episodes that one evaluation ticket asks for.

    Raises:
        Interrupted: `stop` was set.
    """
    groups = await collector.collect(pb.PURPOSE_DEMONSTRATION, settings.demonstrations, stop)
    samples = [to_sample(episode) for group in groups for episode in _trainable(group)]
    log.info("warm start: %d demonstrations", len(samples))
    order = np.random.default_rng(seed)

    def imitate(state: TrainState, updates: int) -> TrainState:
        for _ in range(updates):
            chosen = order.choice(len(samples), min(settings.batch_size, len(samples)), replace=False)
            state = _update(learner, state, [samples[number] for number in chosen], max_row_tokens, buckets)
        return state

    for done in range(0, settings.max_updates, settings.evaluate_every):
        updates = min(settings.evaluate_every, settings.max_updates - done)
        state = await compute(imitate, state, updates)
        await publisher.publish(state.parameters)
        tickets = -(-settings.evaluation_episodes // group_size)
        reward = _mean_reward(await collector.collect(pb.PURPOSE_EVALUATION, tickets, stop))
        log.info("warm start: %d updates, mean sampled reward %.3f", done + updates, reward)
        if reward >= settings.stop_at_reward:
            return state
    log.warning(
        "warm start: trainer.warm_start.stop_at_reward (%.3f) was not reached in %d updates; going on without it",
        settings.stop_at_reward,
        settings.max_updates,
    )
    return state


def _update(
    learner: Learner, state: TrainState, samples: Sequence[Sample], max_row_tokens: int, buckets: tuple[int, ...]
) -> TrainState:
    sums = learner.zeros()
    for microbatch in pack(samples, max_row_tokens=max_row_tokens, buckets=buckets):
        sums = learner.accumulate_supervised(state.parameters, sums, microbatch)
    state, _ = learner.apply(state, sums)
    return jax.block_until_ready(state)


def _trainable(group: pb.TrajectoryGroup) -> list[pb.Trajectory]:
    return [episode for episode in group.trajectories if records.is_trainable(episode)]


def _mean_reward(groups: Sequence[pb.TrajectoryGroup]) -> float:
    rewards = [records.total_reward(episode) or 0.0 for group in groups for episode in _trainable(group)]
    return sum(rewards) / len(rewards)
