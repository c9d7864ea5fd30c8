"""Groups as Redis delivers them: each once to this process, oldest first.

Redis forgets no delivery that was not acknowledged. After a start, and after a reply that was lost on its way, the
inbox asks for all of those again and drops the ones that it has handed out before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from headrace.stream import GroupEntry, Streams
from services.trainer.insist import PASSING, insist

log = logging.getLogger(__name__)

_PAUSE_S = 0.5


class Inbox:
    """The trainer's end of the groups stream."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self._held: set[str] = set()
        self._after: str | None = "0"

    async def read(self, count: int, block_s: float) -> list[GroupEntry]:
        """Up to `count` groups that were not handed out before; none when none came within block_s seconds."""
        while True:
            try:
                entries = await self._streams.read_groups(count, block_s, after=self._after)
            except PASSING as error:
                log.warning("Redis does not answer (%s); trying again in %.1f s", error, _PAUSE_S)
                self._after = "0"
                await asyncio.sleep(_PAUSE_S)
                continue
            again = self._after is not None
            if again:
                self._after = entries[-1].entry_id if entries else None
            fresh = [entry for entry in entries if entry.entry_id not in self._held]
            if fresh or not again:
                self._held.update(entry.entry_id for entry in fresh)
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
