"""Which engine answers a call, and when. Routes and calls' ends come in, places at engines go out; `enter` waits.

A route is one episode's. It stays with one engine, which holds its prefix, as long as that engine can be called and is
not more than twice as loaded as another that has room. The first call of a route, and one whose engine is gone, goes to

    an engine that has the weights the call demands, if any has; the engine holds the call until it has them
    of those, a lightly loaded one: the least loaded, or with `affinity` any whose load is below
        max((1 + 1/4) · mean load, least load + affinity)
    of those, the one that ranks first for the route's key

Ranks come from rendezvous hashing (Thaler and Ravishankar 1998, https://doi.org/10.1109/90.663936), so gateways that
see similar loads choose alike without talking to each other; the bound is that of consistent hashing with bounded loads
(Mirrokni, Thorup and Zadimoghaddam 2018, https://arxiv.org/abs/1608.01350). With a prefix cache the key is a group's:
its episodes share their prompt, and `affinity` is how many of them may gather before load counts for more.

Calls that find no place wait in line: those of a route behind their engine, the others for any. While no engine can be
called, because none is ready or every circuit is open, all wait; nothing fails for that.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
from collections import deque
from collections.abc import Iterable, Sequence

from services.rollout.engine import Engine

_EXCESS = 0.25
_OVERLOAD = 2  # how many times the load of another engine makes a route leave its own


@dataclasses.dataclass(eq=False)
class Route:
    """One episode's way to engines. `key`: equal for episodes that share a prefix."""

    key: str
    min_policy_version: int = 0
    engine: Engine | None = None


@dataclasses.dataclass(frozen=True)
class Place:
    """A call at an engine. `probe`: whether its end decides about the engine's circuit."""

    engine: Engine
    probe: bool


@dataclasses.dataclass(eq=False)
class _Waiter:
    route: Route
    avoided: Engine | None
    place: asyncio.Future[Place]


class Router:
    """Gives out places at engines. `engines` may change at any time; `dispatch` must be called after that."""

    def __init__(self, engines: Iterable[Engine] = (), *, affinity: int = 0):
        self.engines = list(engines)
        self._affinity = affinity
        self._lines: dict[Engine | None, deque[_Waiter]] = {}  # by the engine that is waited for; None: any

    @property
    def waiting(self) -> int:
        """Calls that wait for a place."""
        return sum(map(len, self._lines.values()))

    @property
    def trouble(self) -> str:
        """Why no call can be sent anywhere, if none can."""
        now_s = _now_s()
        if not any(engine.ready for engine in self.engines):
            return "no engine is ready"
        if not any(engine.usable(now_s) for engine in self.engines):
            return "every engine that is ready has failed lately"
        return ""

    async def enter(self, route: Route, avoided: Engine | None = None) -> Place:
        """A place for a call, as soon as there is one; `avoided` is taken only if there is no other engine.

        It must be given back by `leave`.
        """
        now_s = _now_s()
        engine = self._next(route, avoided, now_s)
        if engine is not None:
            return self._take(route, engine, now_s)
        waiter = _Waiter(route, avoided, asyncio.get_running_loop().create_future())
        held = self._held(route, avoided, now_s)
        self._lines.setdefault(held, deque()).append(waiter)
        for full in self.engines if held is None else (held,):
            full.wanted = True
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter.place.cancelled():
                self._forget(waiter)
            else:  # it was given in the same moment
                self.leave(waiter.place.result())
            raise

    def leave(self, place: Place) -> None:
        """The call has ended; its circuit has been told how, unless it was given up."""
        place.engine.running -= 1
        place.engine.circuit.left(probe=place.probe)
        self.dispatch()

    def attach(self, route: Route, engine: Engine | None) -> None:
        """Moves a route to an engine; None: its episode has ended."""
        if route.engine is not None:
            route.engine.contexts -= 1
        if engine is not None:
            engine.contexts += 1
        route.engine = engine

    def dispatch(self) -> None:
        """Gives the places that there are to those who wait."""
        if not self._lines:
            return
        now_s = _now_s()
        for engine, line in list(self._lines.items()):
            if engine is None:
                continue
            if engine not in self.engines or not engine.usable(now_s):
                self._lines.setdefault(None, deque()).extend(line)
                line.clear()
            while line and (engine.has_room(now_s) or self._lighter(engine, now_s)):
                self._serve(line.popleft(), now_s)
        line = self._lines.get(None, deque())
        for _ in range(len(line)):
            if not any(engine.has_room(now_s) for engine in self.engines):
                break
            waiter = line.popleft()
            if not self._serve(waiter, now_s):
                line.append(waiter)
        self._lines = {engine: line for engine, line in self._lines.items() if line}

    def _serve(self, waiter: _Waiter, now_s: float) -> bool:
        """Whether the waiter needs to wait no more."""
        if waiter.place.done():
            return True
        engine = self._next(waiter.route, waiter.avoided, now_s)
        if engine is None:
            return False
        waiter.place.set_result(self._take(waiter.route, engine, now_s))
        return True

    def _take(self, route: Route, engine: Engine, now_s: float) -> Place:
        if route.engine is not engine:
            self.attach(route, engine)
        engine.running += 1
        return Place(engine, engine.circuit.enter(now_s))

    def _next(self, route: Route, avoided: Engine | None, now_s: float) -> Engine | None:
        """The engine that the route's next call goes to now; None: it has to wait."""
        held = self._held(route, avoided, now_s)
        if held is None:
            return choose(self.engines, route, avoided=avoided, affinity=self._affinity, now_s=now_s)
        if held.has_room(now_s):
            return held
        return self._lighter(held, now_s)

    def _held(self, route: Route, avoided: Engine | None, now_s: float) -> Engine | None:
        """The route's engine, if it can stay there."""
        held = route.engine
        if held is None or held is avoided or held not in self.engines or not held.usable(now_s):
            return None
        return held

    def _lighter(self, held: Engine, now_s: float) -> Engine | None:
        """An engine with room that has much less to do than this full one."""
        lighter = [engine for engine in self.engines if engine.has_room(now_s) and engine is not held]
        least = min(lighter, key=lambda engine: engine.load, default=None)
        return least if least is not None and _OVERLOAD * (least.load + 1) <= held.load else None

    def _forget(self, waiter: _Waiter) -> None:
        for engine, line in list(self._lines.items()):
            if waiter in line:
                line.remove(waiter)
                if not line:
                    del self._lines[engine]


def choose(
    engines: Sequence[Engine], route: Route, *, avoided: Engine | None, affinity: int, now_s: float
) -> Engine | None:
    """The engine for a route that has none; None when none has room, or when only the avoided one has."""
    roomy = [engine for engine in engines if engine.has_room(now_s)]
    others = [engine for engine in roomy if engine is not avoided]
    if not others and any(engine.usable(now_s) for engine in engines if engine is not avoided):
        return None
    able = others or roomy
    if not able:
        return None
    able = [engine for engine in able if engine.policy_version >= route.min_policy_version] or able
    if len(able) == 1:
        return able[0]
    least = min(engine.load for engine in able)
    bound = least + 1
    if affinity:
        mean = (sum(engine.load for engine in able) + 1) / len(able)
        bound = max(math.ceil((1 + _EXCESS) * mean), least + affinity)
    return max((engine for engine in able if engine.load < bound), key=lambda engine: _rank(route.key, engine.url))


def _rank(key: str, url: str) -> bytes:
    return hashlib.blake2b(f"{key} {url}".encode(), digest_size=8).digest()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
