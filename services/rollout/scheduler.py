"""Tickets in, groups out: claims what there is room for, runs it, publishes it once.

    claim loop    waits for places for one more group, then for tickets; also looks for those of silent gateways
    work          one task a ticket, owned by the scheduler's TaskGroup: run_group, then publish until Redis answers
    keeper        renews the claims three times per claim timeout, and abandons those that are lost

A ticket that this gateway holds ends in one of four ways: its group is published; another gateway's publication came
first and ours is discarded; its claim is lost, and the episodes are cancelled; a drain's time is over, and it is given
back. What goes wrong in a group is told in the group that is published, so no ticket comes round for ever. While Redis
is away ended groups are held and published later; past max_unpublished_groups of them nothing more is claimed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging

from redis.exceptions import RedisError

from headrace.stream import Streams, Ticket
from headrace.v1 import trajectory_pb2 as pb
from services.rollout import metrics, spans
from services.rollout.episode import World, group_size, run_group, unknown_environment
from services.rollout.slots import Lease, Slots

log = logging.getLogger(__name__)

_CLAIM_BATCH = 4  # tickets of one claim, so that a burst spreads over the gateways that wait for it
_BLOCK_S = 1.0  # how soon a drain is noticed, and how often silent gateways' tickets are looked for
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 2.0


@dataclasses.dataclass(eq=False)
class _Held:
    """A ticket in work."""

    ticket: Ticket
    lease: Lease
    claimed_s: float  # of the loop's clock
    ended: bool = False  # its episodes have; it waits for its publication


class Scheduler:
    """Runs the tickets of one gateway. `run` works until `drain` has ended it."""

    def __init__(
        self, streams: Streams, world: World, slots: Slots, *, gateway: str, run_id: str, claim_timeout_s: float
    ):
        self._streams = streams
        self._world = world
        self._slots = slots
        self._gateway = gateway
        self._run_id = run_id
        self._renewal_s = claim_timeout_s / 3
        self._held: dict[str, _Held] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        self.draining = False

    @property
    def running_groups(self) -> int:
        """Tickets that it holds."""
        return len(self._held)

    async def run(self) -> None:
        """Works until it has been drained."""
        async with asyncio.TaskGroup() as tasks:
            keeper = tasks.create_task(self._keep_claims())
            await self._claim(tasks)
            await self._slots.until(lambda: not self._held)
            keeper.cancel()

    async def drain(self, timeout_s: float) -> int:
        """Claims no more, lets groups end within the limit, gives the rest back and returns how many those were."""
        self.draining = True
        self._slots.changed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._slots.until(lambda: not self._held)
        unfinished = [held.ticket for held in self._held.values()]
        for work in self._work.values():
            work.cancel()
        await self._slots.until(lambda: not self._held)
        if unfinished:
            log.warning("%d groups did not end within %g s; their tickets are given back", len(unfinished), timeout_s)
        await self._give_back(unfinished)
        return len(unfinished)

    async def _claim(self, tasks: asyncio.TaskGroup) -> None:
        """Takes tickets as places come free, until a drain begins."""
        delay_s, next_take_over_s = _FIRST_DELAY_S, 0.0
        while not self.draining:
            await self._slots.until(lambda: self.draining or self._has_room())
            count = min(_CLAIM_BATCH, self._slots.free // self._world.settings.group_size)
            tickets: list[Ticket] = []
            try:
                if _now_s() >= next_take_over_s:
                    next_take_over_s = _now_s() + _BLOCK_S
                    tickets = await self._take_over(count)
                if not tickets and not self.draining:
                    tickets = await self._streams.claim(self._gateway, count, _BLOCK_S)
                    metrics.claimed_tickets.labels("new").inc(len(tickets))
                delay_s = _FIRST_DELAY_S
            except RedisError as error:
                delay_s = await self._back_off("claim tickets", error, delay_s)
                with contextlib.suppress(RedisError):
                    await self._streams.open()  # it may have come back without its memory
            # A Redis that lost its last second hands out again what is in work here: the claim is all that was missing.
            tickets = [ticket for ticket in tickets if ticket.ticket_id not in self._held]
            while tickets and not self.draining and self._has_room():
                self._start(tickets.pop(0), tasks)
            await self._give_back(tickets)  # a drain has begun, or RunEpisodes took their places meanwhile

    def _has_room(self) -> bool:
        unpublished = sum(held.ended for held in self._held.values())
        settings = self._world.settings
        return self._slots.free >= settings.group_size and unpublished < settings.max_unpublished_groups

    async def _take_over(self, count: int) -> list[Ticket]:
        """Tickets of silent gateways, and of an earlier process of this name."""
        tickets = await self._streams.take_over(self._gateway, count)
        tickets = [ticket for ticket in tickets if ticket.ticket_id not in self._held]
        metrics.claimed_tickets.labels("taken_over").inc(len(tickets))
        return tickets

    def _start(self, ticket: Ticket, tasks: asyncio.TaskGroup) -> None:
        held = _Held(ticket, self._slots.lease(group_size(ticket.task, self._world.settings)), _now_s())
        work = tasks.create_task(self._run_ticket(held))
        self._held[ticket.ticket_id], self._work[ticket.ticket_id] = held, work
        metrics.running_groups.set(len(self._held))
        # Not the task's own business: one that is cancelled before its first step runs no `finally`.
        work.add_done_callback(lambda _: self._forget(held))

    def _forget(self, held: _Held) -> None:
        del self._held[held.ticket.ticket_id], self._work[held.ticket.ticket_id]
        metrics.running_groups.set(len(self._held))
        metrics.unpublished_groups.set(sum(other.ended for other in self._held.values()))
        held.lease.close()

    async def _run_ticket(self, held: _Held) -> None:
        """Runs the ticket's episodes, then publishes the group."""
        task = held.ticket.task
        try:
            trajectories = await self._run_group(held)
        except Exception as error:
            log.exception("group of task %s failed", task.task_id)
            trajectories = _failed(held.ticket, pb.EPISODE_STATUS_CANCELLED, f"gateway: {_line(error)}")
        held.ended = True
        metrics.unpublished_groups.set(sum(other.ended for other in self._held.values()))
        group = pb.TrajectoryGroup(
            task=task,
            trajectories=trajectories,
            run_id=self._run_id,
            ticket_id=held.ticket.ticket_id,
            gateway=self._gateway,
        )
        with spans.publishing(group):
            await self._publish(group)

    async def _run_group(self, held: _Held) -> list[pb.Trajectory]:
        ticket = held.ticket
        if ticket.defect:
            return _failed(ticket, pb.EPISODE_STATUS_CANCELLED, ticket.defect)
        if ticket.task.environment not in self._world.environments:
            detail = unknown_environment(ticket.task, self._world)
            return _failed(ticket, pb.EPISODE_STATUS_ENVIRONMENT_ERROR, detail, "refused")
        return await run_group(ticket.task, world=self._world, queued_s=held.claimed_s, on_end=held.lease.give)

    async def _publish(self, group: pb.TrajectoryGroup) -> None:
        """Ends the ticket with its group; waits as long as Redis is away."""
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                published = await self._streams.publish(group.ticket_id, group)
            except RedisError as error:
                delay_s = await self._back_off("publish a group", error, delay_s)
                continue
            (metrics.published_groups if published else metrics.fenced_groups).inc()
            return

    async def _keep_claims(self) -> None:
        """Renews the claims until it is cancelled; abandons what another gateway has by now."""
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                lost = await self._streams.keep_claims(self._gateway, list(self._held))
                delay_s = _FIRST_DELAY_S
            except RedisError as error:
                delay_s = await self._back_off("renew claims", error, delay_s)
                continue
            for ticket_id in lost:
                held = self._held.get(ticket_id)
                if held and not held.ended:  # else its publication tells
                    log.warning("the claim of ticket %s is lost; its episodes are cancelled", ticket_id)
                    metrics.lost_claims.inc()
                    self._work[ticket_id].cancel()
            await asyncio.sleep(self._renewal_s)

    async def _give_back(self, tickets: list[Ticket]) -> None:
        with contextlib.suppress(RedisError):  # then they are taken over once the claim timeout has passed
            await self._streams.release(self._gateway, [ticket.ticket_id for ticket in tickets])

    async def _back_off(self, what: str, error: RedisError, delay_s: float) -> float:
        """Waits, and returns how long to wait the next time."""
        metrics.redis_errors.inc()
        log.warning("cannot %s (%s: %s); trying again in %.2g s", what, type(error).__name__, error, delay_s)
        await asyncio.sleep(delay_s)
        return min(2 * delay_s, _LONGEST_DELAY_S)


def _failed(ticket: Ticket, status: pb.EpisodeStatus, detail: str, cause: str = "gateway") -> list[pb.Trajectory]:
    """The one episode of a ticket that could not be run."""
    trajectory_id = f"{ticket.task.task_id or ticket.ticket_id}-0"
    return [pb.Trajectory(trajectory_id=trajectory_id, status=status, status_detail=detail, cause=cause)]


def _line(error: BaseException) -> str:
    """One line about an error, the first of a group's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
