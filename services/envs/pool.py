"""Warm pools: resources that are slow to start, started ahead of the episodes that need them.

    async with Pool(start_browser, size=4, check=is_alive, close=stop_browser) as browsers:
        browser = await browsers.acquire()
        ...
        await browsers.release(browser)

`size` resources are kept ready; what is handed out is replaced in the background. Each is checked when it is handed
out: a dead one is closed and never seen. A released one is closed unless its user says that it is as new, since one
episode's state must not reach the next. The end of the block closes all, those that are out too.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any

from services.envs import metrics

log = logging.getLogger(__name__)

_SLOWEST_RETRY_S = 10.0


class PoolError(Exception):
    """No resource became available in time; the message says why."""


class Pool[T]:
    """Resources of one kind."""

    def __init__(
        self,
        make: Callable[[], Awaitable[T]],
        *,
        size: int,
        most: int | None = None,
        check: Callable[[T], Any] | None = None,
        close: Callable[[T], Any] | None = None,
        check_timeout_s: float = 5.0,
        name: str = "pool",
    ):
        """Makes nothing yet.

        Args:
            make: starts a resource.
            size: resources that are kept ready, at least 1.
            most: resources at once, ready or handed out; None: no limit but the server's capacity.
            check: whether a resource is alive; sync or async. Raising, or taking longer than `check_timeout_s`, is no.
            close: ends a resource; sync or async. What it raises is logged.
            check_timeout_s: for `check`, in seconds.
            name: for metrics.
        """
        if size < 1 or (most is not None and most < size):
            raise ValueError(f"a pool keeps at least 1 ready and at most `most`, not size={size}, most={most}")
        self._make, self._check, self._close = make, check, close
        self._size, self._most, self._check_timeout_s, self._name = size, most, check_timeout_s, name
        self._ready: asyncio.Queue[T] = asyncio.Queue()
        self._out: dict[int, T] = {}
        self._checked = 0
        self._making: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None
        self._is_open = False

    async def __aenter__(self) -> Pool[T]:
        """Waits for the first resource; raises what making it raised."""
        self._is_open = True
        self._ready.put_nowait(await self._make())
        self._top_up()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        for task in self._making:
            task.cancel()
        await asyncio.gather(*self._making, return_exceptions=True)
        while not self._ready.empty():
            self._end(self._ready.get_nowait())
        for resource in self._out.values():
            self._end(resource)
        self._out.clear()
        await asyncio.gather(*self._ending)
        self._count()

    async def acquire(self, *, timeout_s: float | None = 60.0) -> T:
        """A live resource. Raises PoolError when there is none within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    resource = await self._ready.get()
                    self._checked += 1
                    alive = False
                    try:
                        alive = await self._is_alive(resource)
                    finally:
                        self._checked -= 1
                        if alive:
                            self._out[id(resource)] = resource
                        else:
                            self._end(resource)
                        self._top_up()
                    if alive:
                        return resource
                    metrics.pool_dead.labels(self._name).inc()
        except TimeoutError as error:
            why = (
                f"making one raised {type(self._failure).__name__}: {self._failure}" if self._failure else "all are out"
            )
            raise PoolError(f"no {self._name} resource within {timeout_s:g} s: {why}") from (self._failure or error)

    async def release(self, resource: T, *, reuse: bool = False) -> None:
        """Takes a resource back. `reuse`: nothing of its last use is left in it; else it is closed."""
        if self._out.pop(id(resource), None) is None:
            return  # closed with the pool
        if reuse and self._ready.qsize() < self._size:
            self._ready.put_nowait(resource)
            self._count()
        else:
            self._end(resource)
        self._top_up()

    @contextlib.asynccontextmanager
    async def resource(self) -> AsyncIterator[T]:
        """One that is acquired and released around a block."""
        acquired = await self.acquire()
        try:
            yield acquired
        finally:
            await self.release(acquired)

    def _top_up(self) -> None:
        """Starts making what is missing."""
        while self._is_open:
            coming = self._ready.qsize() + len(self._making)
            if coming >= self._size or (
                self._most is not None and coming + self._checked + len(self._out) >= self._most
            ):
                break
            task = asyncio.create_task(self._make_one())
            self._making.add(task)
            task.add_done_callback(self._making.discard)
        self._count()

    async def _make_one(self) -> None:
        retry_s = 0.1
        while True:
            try:
                self._ready.put_nowait(await self._make())
                self._failure = None
                self._count()
                return
            except Exception as error:  # noqa: BLE001 - what it depends on may come back
                self._failure = error
                log.warning("a %s resource cannot be made (%s), trying again", self._name, error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _SLOWEST_RETRY_S)

    async def _is_alive(self, resource: T) -> bool:
        if self._check is None:
            return True
        try:
            async with asyncio.timeout(self._check_timeout_s):
                answer = self._check(resource)
                return bool(await answer if inspect.isawaitable(answer) else answer)
        except Exception as error:  # noqa: BLE001 - whatever it is, the resource cannot be used
            log.info("a %s resource is dead: %s", self._name, error)
            return False

    def _end(self, resource: T) -> None:
        task = asyncio.create_task(self._closed(resource))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _closed(self, resource: T) -> None:
        if self._close is None:
            return
        try:
            answer = self._close(resource)
            if inspect.isawaitable(answer):
                await answer
        except Exception:
            log.exception("closing a %s resource failed", self._name)

    def _count(self) -> None:
        metrics.pool_ready.labels(self._name).set(self._ready.qsize())
