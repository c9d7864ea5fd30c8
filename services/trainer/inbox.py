"""Groups as Redis delivers them: each once to this process, oldest first.

Redis forgets no delivery that was not acknowledged. After a start, and after a reply that was lost on its way, the
inbox asks for all of those again and drops the ones that it has handed out before. A Redis that crashed may also bring
back what was acknowledged in its last second, or nothing at all: the one is acknowledged again, the other made anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from redis.exceptions import AuthenticationError, ResponseError

from headrace.stream import GroupEntry, Streams
from services.trainer.insist import PASSING, insist

log = logging.getLogger(__name__)

_PAUSE_S = 0.5
# What Redis says to a reader of a stream that is gone, and to one that was waiting when it went.
_FORGOTTEN = ("NOGROUP", "UNBLOCKED")


class Inbox:
    """The trainer's end of the groups stream."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self._held: set[str] = set()
        self._newest = (0, 0)  # Redis delivers in the order of ids, so what comes later is newer
        self._after: str | None = "0"

    async def read(self, count: int, block_s: float) -> list[GroupEntry]:
        """Up to `count` groups that were not handed out before; none when none came within block_s seconds, or at once
        when Redis has lost its memory."""
        while True:
            try:
                entries = await self._streams.read_groups(count, block_s, after=self._after)
            except AuthenticationError:
                raise
            except PASSING as error:
                log.warning("Redis does not answer (%s); trying again in %.1f s", error, _PAUSE_S)
                self._after = "0"
                await asyncio.sleep(_PAUSE_S)
                continue
            except ResponseError as error:
                if not str(error).startswith(_FORGOTTEN):
                    raise
                log.warning("Redis has lost the groups stream (%s); opening it again", error)
                await insist(self._streams.open)
                return []
            again = self._after is not None
            if again:
                self._after = entries[-1].entry_id if entries else None
            unknown = [entry for entry in entries if entry.entry_id not in self._held]
            fresh = [entry for entry in unknown if _order(entry.entry_id) > self._newest]
            if len(fresh) < len(unknown):
                await self.acknowledge([entry.entry_id for entry in unknown if entry not in fresh])
            if fresh or not again:
                self._held.update(entry.entry_id for entry in fresh)
                self._newest = max([self._newest, *(_order(entry.entry_id) for entry in fresh)])
                return fresh

    async def acknowledge(self, entry_ids: Iterable[str]) -> None:
        """Removes groups from Redis for good."""
        ids = list(entry_ids)
        await insist(lambda: self._streams.acknowledge_groups(ids))
        self._held.difference_update(ids)

    async def dead_letter(self, entry: GroupEntry, reason: str) -> None:
        """Sets a malformed group aside with the reason."""
        await insist(lambda: self._streams.dead_letter(entry, reason))
        self._held.discard(entry.entry_id)


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number)
