"""Pauses that grow while nothing but failures comes, so that a broken environment does not use up a run's tasks."""

from __future__ import annotations

import asyncio
import logging

log = logging.getLogger(__name__)

_FREE_FAILURES = 64
_DOUBLINGS, _LONGEST_PAUSE_S = 7, 10.0


class Patience:
    """Counts failed groups since the last good one."""

    def __init__(self) -> None:
        self._failures = 0

    def succeeded(self) -> None:
        """A good group came."""
        self._failures = 0

    async def failed(self, count: int) -> None:
        """Groups failed; returns after a pause that is 0 for the first few and then grows."""
        before, self._failures = self._failures, self._failures + count
        rounds = self._failures // _FREE_FAILURES
        if rounds == 0 or before == self._failures:
            return
        pause_s = min(0.1 * 2 ** min(rounds, _DOUBLINGS), _LONGEST_PAUSE_S)
        log.warning("the last %d groups failed: is an environment or an engine down?", self._failures)
        await asyncio.sleep(pause_s)
