"""Keeps the list of engines true to what names resolve to, and each engine's state true to its own word.

A follower for each name that must be looked up, a watcher for each engine: it asks the engine how it fares about every
second, at once when a call to it failed, and ever more seldom while it does not answer. Every question has a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from services.rollout import lookup, metrics
from services.rollout.dialect import Dialect, Http, HttpError
from services.rollout.engine import Engine
from services.rollout.router import Router

log = logging.getLogger(__name__)

_LOOK_TIMEOUT_S = 10.0
_LOOK_PERIOD_S = 1.0  # of a ready engine; one that is not ready is asked sooner
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 2.0


class Discovery:
    """The engines behind the run's addresses. `ready` is notified whenever an engine becomes ready or ceases to be."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        router: Router,
        dialect: Dialect,
        make: Callable[[str], Engine],
        resolve: Callable[[str], Awaitable[frozenset[str]]],
        lookup_period_s: float,
        scheme: str = "http",
    ):
        self.ready = asyncio.Condition()
        self._names = [address for address in addresses if lookup.is_name(address)]
        self._router, self._dialect, self._make = router, dialect, make
        self._resolve, self._lookup_period_s = resolve, lookup_period_s
        self._scheme = scheme
        self._told: dict[Engine, str] = {}  # what is wrong with an engine that is there
        self._watchers: dict[Engine, asyncio.Task[None]] = {}
        self._followers: list[asyncio.Task[None]] = []
        self._http: Http
        self._tasks: asyncio.TaskGroup
        # Those of fixed addresses; others join and leave as names are looked up.
        fixed = [address for address in addresses if address not in self._names]
        router.engines += [make(address if "://" in address else f"{scheme}://{address}") for address in fixed]

    def start(self, http: Http, tasks: asyncio.TaskGroup) -> None:
        """Begins to watch; the tasks belong to the group, and end by `stop`."""
        self._http, self._tasks = http, tasks
        for engine in self._router.engines:
            self._watch(engine)
        self._followers = [tasks.create_task(self._follow(name)) for name in self._names]

    def stop(self) -> None:
        """Watches no more."""
        for task in (*self._followers, *self._watchers.values()):
            task.cancel()
        for engine in self._router.engines:
            metrics.forget_engine(engine)

    async def set_ready(self, engine: Engine, ready: bool) -> None:
        """Takes note that the engine takes calls, or takes none."""
        if engine.ready == ready:
            return
        engine.ready = ready
        log.info("engine %s is %s", engine.url, "ready" if ready else "not ready")
        metrics.ready_engines.set(sum(engine.ready for engine in self._router.engines))
        self._router.dispatch()
        async with self.ready:
            self.ready.notify_all()

    def _watch(self, engine: Engine) -> None:
        metrics.show_engine(engine)
        self._watchers[engine] = self._tasks.create_task(self._look_again_and_again(engine))

    async def _follow(self, name: str) -> None:
        """Keeps the engines true to what a name resolves to. Calls that run at a host that leaves may end there."""
        known: dict[str, Engine] = {}
        while True:
            # A name that does not resolve tells nothing: its engines' readiness does.
            hosts = await self._resolve(name) or known.keys()
            for host in hosts - known.keys():
                self._http.name(host, name)
                engine = known[host] = self._make(f"{self._scheme}://{host}")
                self._router.engines.append(engine)
                self._watch(engine)
            for host in known.keys() - hosts:
                engine = known.pop(host)
                self._router.engines.remove(engine)
                self._watchers.pop(engine).cancel()
                metrics.forget_engine(engine)
                await self.set_ready(engine, False)
            await asyncio.sleep(self._lookup_period_s if known else _FIRST_DELAY_S)

    async def _look_again_and_again(self, engine: Engine) -> None:
        delay_s = _FIRST_DELAY_S
        answered = True
        while True:
            engine.suspected.clear()
            answered_before, answered = answered, await self._look(engine)
            if answered and not answered_before:
                engine.circuit.try_now(asyncio.get_running_loop().time())
            await self.set_ready(engine, answered)
            self._router.dispatch()
            if answered:
                try:
                    async with asyncio.timeout(_LOOK_PERIOD_S * random.uniform(0.75, 1)):
                        await engine.suspected.wait()
                except TimeoutError:
                    delay_s = _FIRST_DELAY_S
                    continue
            if engine.ready:
                await asyncio.sleep(_FIRST_DELAY_S)
            else:
                await asyncio.sleep(delay_s * random.uniform(0.5, 1))
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    def _tell(self, engine: Engine, problem: str) -> None:
        """Logs what will not pass by itself, once."""
        if problem and problem != self._told.get(engine):
            log.error("engine %s: %s", engine.url, problem)
            self._told[engine] = problem

    async def _look(self, engine: Engine) -> bool:
        """Whether the engine takes calls, by its own word; takes note of its load."""
        running = engine.running
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                load = await self._dialect.look(self._http, engine.root)
        except HttpError as error:
            self._tell(engine, error.message if error.status == 401 else "")
            return False
        except (aiohttp.ClientError, OSError, TimeoutError):
            self._tell(engine, await self._http.diagnose(engine.root))
            return False
        except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
            # An engine may talk nonsense of itself and still answer calls; each reply to those is checked.
            self._tell(engine, f"what it says of its load cannot be read: {type(error).__name__}: {str(error)[:200]}")
            return True
        self._told.pop(engine, None)
        if load is not None:
            engine.observe(load, asked_at=running)
        return True
