"""Tickets and groups over Redis Streams: who holds what, and what has ended.

    trainer --issue--> [tasks] --claim/take_over--> gateway --publish--> [groups] --read--> trainer --acknowledge-->

A ticket is an entry of the tasks stream. It exists from `issue` until its one terminal event: `publish` removes it and
appends its group in a single transaction, so of several gateways that worked on it the first wins and the others are
told so. A group exists until the trainer has made durable what it learned from it and acknowledges it. Nothing is
trimmed by count: what Redis holds is bounded by the number of outstanding tickets.

All keys begin with headrace:{RUN_ID}: , so runs share a server without meeting, and one run's keys share a hash slot of
a Redis cluster. A RedisError means that the reply was lost, not that nothing happened: every call here may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import redis.asyncio
from google.protobuf.message import DecodeError
from redis.exceptions import ResponseError

from headrace.trajectory import RecordError, check_task
from headrace.v1.trajectory_pb2 import Task, TrajectoryGroup

_GATEWAYS = "gateways"
_TRAINER = "trainer"
_FIELD = "record"


class CursorMoved(Exception):
    """Another trainer has issued tickets of this run: two trainers must not share a run id."""


class Ticket(NamedTuple):
    """A claimed task. `defect` says why the entry holds no task, if it does not."""

    ticket_id: str
    task: Task
    defect: str = ""


class GroupEntry(NamedTuple):
    """One entry of the groups stream, not yet parsed."""

    entry_id: str
    payload: bytes


class Streams:
    """One run's streams. Safe for concurrent use by tasks of one event loop."""

    def __init__(self, client: redis.asyncio.Redis, run_id: str, *, claim_timeout_s: float):
        if not run_id:
            raise ValueError("run_id is empty")
        prefix = f"headrace:{{{run_id}}}"
        self._tasks, self._groups = f"{prefix}:tasks", f"{prefix}:groups"
        self._dead, self._state = f"{prefix}:dead", f"{prefix}:state"
        self._claim_timeout_ms = int(claim_timeout_s * 1000)
        self._redis: Any = client
        self._scripts = {name: client.register_script(source) for name, source in _SCRIPTS.items()}

    async def open(self) -> None:
        """Creates what the run needs, unless it exists. Any service may come first."""
        for stream, group in ((self._tasks, _GATEWAYS), (self._groups, _TRAINER)):
            try:
                await self._redis.xgroup_create(stream, group, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    # The trainer's side.

    async def issue(self, tasks: Sequence[Task], *, first_sequence: int) -> list[str]:
        """Adds tickets number first_sequence, first_sequence + 1, … and moves the cursor past them, all or nothing.

        Returns their ids, also when they were issued by an earlier call whose reply was lost.

        Raises:
            CursorMoved: the cursor stands elsewhere.
        """
        payloads = [task.SerializeToString() for task in tasks]
        ids = await self._scripts["issue"](keys=[self._tasks, self._state], args=[first_sequence, *payloads])
        if ids is None:
            raise CursorMoved(
                f"ticket {first_sequence} is not the next one of this run: does another trainer use its id?"
            )
        return [entry_id.decode() for entry_id in ids]

    async def cursor(self) -> int:
        """Number of the next ticket."""
        return int(await self._redis.hget(self._state, "cursor") or 0)

    async def advance_cursor(self, at_least: int) -> None:
        """Moves the cursor forward to a number that a checkpoint knows, after Redis lost its memory."""
        await self._scripts["raise"](keys=[self._state], args=["cursor", at_least])

    async def ticket_count(self) -> int:
        """Tickets that have no terminal event yet."""
        return int(await self._redis.xlen(self._tasks))

    async def group_count(self) -> int:
        """Groups that are not acknowledged."""
        return int(await self._redis.xlen(self._groups))

    async def group_ids(self) -> list[str]:
        """Ids of the groups that are not acknowledged, oldest first."""
        return [entry_id.decode() for entry_id, _ in await self._redis.xrange(self._groups)]

    async def read_groups(self, count: int, block_s: float, *, after: str | None = None) -> list[GroupEntry]:
        """Up to `count` groups, oldest first, waiting up to block_s seconds for the first.

        Args:
            count: how many at the most.
            block_s: how long to wait; 0 returns at once.
            after: None reads groups that were never delivered. An id reads again those behind it that were delivered
                and not acknowledged ("0": all of them); it never waits.
        """
        block = int(block_s * 1000) or None if after is None else None
        reply = await self._redis.xreadgroup(
            _TRAINER, "learner", {self._groups: ">" if after is None else after}, count=count, block=block
        )
        return [
            GroupEntry(entry_id.decode(), fields.get(_FIELD.encode(), b""))
            for entry_id, fields in _entries(reply)
            if fields is not None
        ]

    async def acknowledge_groups(self, entry_ids: Iterable[str]) -> int:
        """Removes groups for good and returns how many were still there."""
        ids = list(entry_ids)
        if not ids:
            return 0
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.xack(self._groups, _TRAINER, *ids)
            pipeline.xdel(self._groups, *ids)
            return int((await pipeline.execute())[1])

    async def dead_letter(self, entry: GroupEntry, reason: str) -> None:
        """Moves a group that cannot be true to the dead stream, with the reason."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.xadd(self._dead, {_FIELD: entry.payload, "reason": reason, "entry_id": entry.entry_id})
            pipeline.xack(self._groups, _TRAINER, entry.entry_id)
            pipeline.xdel(self._groups, entry.entry_id)
            await pipeline.execute()

    async def dead_letters(self) -> list[tuple[str, str]]:
        """(entry id in the groups stream, reason) of each dead letter, oldest first."""
        return [
            (fields[b"entry_id"].decode(), fields[b"reason"].decode())
            for _, fields in await self._redis.xrange(self._dead)
        ]

    async def reserve_version(self, at_least: int) -> int:
        """Takes a policy_version: at_least, or one more than the greatest that this run ever took."""
        return int(await self._scripts["reserve"](keys=[self._state], args=["policy_version", at_least]))

    # The gateways' side.

    async def claim(self, gateway: str, count: int, block_s: float) -> list[Ticket]:
        """Up to `count` tickets that nobody holds, waiting up to block_s seconds for the first."""
        reply = await self._redis.xreadgroup(
            _GATEWAYS, gateway, {self._tasks: ">"}, count=count, block=int(block_s * 1000) or None
        )
        return [_ticket(entry_id, fields) for entry_id, fields in _entries(reply)]

    async def take_over(self, gateway: str, count: int) -> list[Ticket]:
        """Up to `count` tickets whose holders kept silent for the claim timeout, or gave them back."""
        # XAUTOCLAIM looks at ten times `count` claims and no further: one behind them would wait for theirs to end.
        silent = await self._redis.xpending_range(
            self._tasks, _GATEWAYS, min="-", max="+", count=count, idle=self._claim_timeout_ms
        )
        if not silent:
            return []
        ids = [claim["message_id"] for claim in silent]
        entries = await self._redis.xclaim(self._tasks, _GATEWAYS, gateway, self._claim_timeout_ms, ids)
        return [_ticket(entry_id, fields) for entry_id, fields in entries if fields is not None]

    async def keep_claims(self, gateway: str, ticket_ids: Iterable[str]) -> set[str]:
        """Renews claims and returns those that are lost: ended, or another gateway's by now."""
        ids = list(ticket_ids)
        if not ids:
            return set()
        lost = await self._scripts["keep"](keys=[self._tasks], args=[_GATEWAYS, gateway, *ids])
        return {entry_id.decode() for entry_id in lost}

    async def publish(self, ticket_id: str, group: TrajectoryGroup) -> bool:
        """Ends a ticket with its group, unless it has already ended: then False, and the group is discarded.

        A repeated call after a lost reply returns False too; the group is in the stream exactly once either way.
        """
        payload = group.SerializeToString()
        added = await self._scripts["publish"](keys=[self._tasks, self._groups], args=[_GATEWAYS, ticket_id, payload])
        return added is not None

    async def release(self, gateway: str, ticket_ids: Iterable[str]) -> None:
        """Gives held tickets back: `take_over` finds them at once."""
        ids = list(ticket_ids)
        if ids:
            await self._scripts["release"](keys=[self._tasks], args=[_GATEWAYS, gateway, self._claim_timeout_ms, *ids])


def connect(url: str, *, timeout_s: float) -> redis.asyncio.Redis:
    """A client with deadlines. A blocking read may last longer than `timeout_s`; everything else may not.

    Raises:
        ValueError: the url is no redis address.
    """
    return redis.asyncio.Redis.from_url(
        url, socket_connect_timeout=timeout_s, socket_timeout=timeout_s + _LONGEST_BLOCK_S, health_check_interval=30
    )


def remedy(url: str, error: Exception) -> str:
    """What to do about an error of a server's at this address that does not pass by itself."""
    text, secured = str(error), url.startswith("rediss:")
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "let ssl_ca_certs in redis.url name the file of who signed its certificate, for this host"
    if secured and "No such file" in text:
        return "let ssl_ca_certs in redis.url name a file that there is"
    if secured and "SSL" in text:
        return "if it speaks no TLS, begin redis.url with redis://"
    if not secured and ("reset by peer" in text or "closed by server" in text):
        return "if it speaks TLS, begin redis.url with rediss://"
    return "start it, or correct redis.url"


_LONGEST_BLOCK_S = 5.0


def _entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of a reply about one stream, in the forms of RESP2 and RESP3."""
    if not reply:
        return []
    if isinstance(reply, dict):
        (batches,) = reply.values()
        return [entry for batch in batches for entry in batch]
    ((_, entries),) = reply
    return cast(list[tuple[bytes, dict[bytes, bytes]]], entries)


def _ticket(entry_id: bytes, fields: dict[bytes, bytes]) -> Ticket:
    try:
        task = Task.FromString(fields[_FIELD.encode()])
        check_task(task)
    except (KeyError, DecodeError, RecordError) as error:
        return Ticket(entry_id.decode(), Task(), f"ticket is malformed: {error}")
    return Ticket(entry_id.decode(), task)


_SCRIPTS = {
    # ARGV: first sequence number, payloads. The reply of a repeated call is that of the first.
    "issue": """
        local cursor = tonumber(redis.call('HGET', KEYS[2], 'cursor') or '0')
        local first = tonumber(ARGV[1])
        if cursor == first + #ARGV - 1 and redis.call('HGET', KEYS[2], 'issued_first') == ARGV[1] and #ARGV > 1 then
            return cjson.decode(redis.call('HGET', KEYS[2], 'issued_ids'))
        end
        if cursor ~= first then return false end
        local ids = {}
        for i = 2, #ARGV do ids[i - 1] = redis.call('XADD', KEYS[1], '*', 'record', ARGV[i]) end
        redis.call('HSET', KEYS[2], 'cursor', first + #ARGV - 1)
        redis.call('HSET', KEYS[2], 'issued_first', ARGV[1], 'issued_ids', cjson.encode(ids))
        return ids
    """,
    "raise": """
        local now = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0')
        if tonumber(ARGV[2]) > now then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
    """,
    "reserve": """
        local last = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0')
        local taken = math.max(last + 1, tonumber(ARGV[2]))
        redis.call('HSET', KEYS[1], ARGV[1], taken)
        return taken
    """,
    # ARGV: consumer group, ticket, payload. XACK does not ask who holds the ticket, so the first to come wins.
    "publish": """
        if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return false end
        redis.call('XDEL', KEYS[1], ARGV[2])
        return redis.call('XADD', KEYS[2], '*', 'record', ARGV[3])
    """,
    # ARGV: consumer group, consumer, tickets. A plain XCLAIM would steal back a ticket that was taken over.
    "keep": """
        local lost = {}
        for i = 3, #ARGV do
            local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
            if #held == 0 then table.insert(lost, ARGV[i])
            else redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID') end
        end
        return lost
    """,
    # ARGV: consumer group, consumer, idle milliseconds to pretend, tickets.
    "release": """
        for i = 4, #ARGV do
            local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
            if #held > 0 then
                redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'IDLE', ARGV[3], 'JUSTID')
            end
        end
    """,
}
