"""Calls to Redis that outlast its absence: the trainer waits for Redis, however long it is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from redis import exceptions

log = logging.getLogger(__name__)

# Redis is away, fails over or is full: all of them end by themselves or by an operator's hand.
PASSING: tuple[type[Exception], ...] = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,  # type: ignore[attr-defined]
)
_LONGEST_PAUSE_S = 5.0


async def insist[T](call: Callable[[], Awaitable[T]]) -> T:
    """The call's result, repeating it until Redis answers. The call must be one that may be repeated.

    Raises:
        AuthenticationError: Redis refuses us, and would again.
    """
    pause_s = 0.1
    while True:
        try:
            return await call()
        except exceptions.AuthenticationError:  # to redis-py it is a ConnectionError
            raise
        except PASSING as error:
            log.warning("Redis does not answer (%s); trying again in %.1f s", error, pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
