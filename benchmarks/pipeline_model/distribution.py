"""How versions of the weights reach the engines: from the trainer alone, or from one another.

    direct     each engine pulls from the trainer; the pulls share its network evenly, so they all end late
    fan-out    the trainer sends a version `fan_out` times; an engine that has it sends it to `fan_out` peers at a time

An engine pulls the newest version that there is when its last pull has ended: a slow one passes versions over. The
caller is told when something here will happen next (`next_s`) and then asks what has (`arrived`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque

from benchmarks.pipeline_model.plan import Weights

_TRAINER = -1
_TOLERANCE_S = 1e-9


class Distribution:
    """All engines' pulls."""

    def __init__(self, weights: Weights, engines: int):
        self._weights = weights
        self._held = [0] * engines
        self._idle = set(range(engines))
        self._newest = 0
        self._numbers = itertools.count()
        # Direct: (share of the link's clock at which it ends, …). Fan-out: (second at which it ends, …).
        self._pulls: list[tuple[float, int, int, int, int]] = []
        self._clock, self._since_s = 0.0, 0.0
        self._trainer_copies = 0
        self._peer_places: deque[int] = deque()
        self._queue: deque[int] = deque()
        self.trainer_bytes = 0.0
        self.trainer_busy_s = 0.0
        self._trainer_pulls = 0

    def announce(self, now_s: float, version: int) -> None:
        """A version is out."""
        self._advance(now_s)
        self._newest, self._trainer_copies = version, 0
        self._peer_places.clear()
        waiting = sorted(self._idle)
        self._idle.clear()
        for engine in waiting:
            self._want(now_s, engine)

    def next_s(self) -> float:
        """When the next pull ends."""
        if not self._pulls:
            return math.inf
        if self._weights.fan_out:
            return self._pulls[0][0]
        return self._since_s + (self._pulls[0][0] - self._clock) / self._rate()

    def arrived(self, now_s: float) -> list[tuple[int, int]]:
        """(engine, version) of the pulls that have ended by now. The engine then says `installed`."""
        self._advance(now_s)
        ended: list[tuple[int, int]] = []
        while self._pulls and self.next_s() <= now_s + _TOLERANCE_S:
            _, _, engine, version, source = heapq.heappop(self._pulls)
            self._trainer_pulls -= source == _TRAINER
            self._held[engine] = version
            ended.append((engine, version))
            if self._weights.fan_out and version == self._newest:
                self._peer_places.extend([engine] * self._weights.fan_out)
                if source != _TRAINER:
                    self._peer_places.append(source)
        while self._queue and self._peer_places:
            self._pull(now_s, self._queue.popleft(), self._peer_places.popleft())
        return ended

    def installed(self, now_s: float, engine: int) -> None:
        """The engine has swapped what it pulled, and is free to pull again."""
        self._advance(now_s)
        if self._held[engine] < self._newest:
            self._want(now_s, engine)
        else:
            self._idle.add(engine)

    def _want(self, now_s: float, engine: int) -> None:
        fan_out = self._weights.fan_out
        if not fan_out:
            self._pull(now_s, engine, _TRAINER)
        elif self._peer_places:
            self._pull(now_s, engine, self._peer_places.popleft())
        elif self._trainer_copies < fan_out:
            self._trainer_copies += 1
            self._pull(now_s, engine, _TRAINER)
        else:
            self._queue.append(engine)

    def _pull(self, now_s: float, engine: int, source: int) -> None:
        size = self._weights.size_bytes * min(
            1.0, self._weights.delta_fraction * (self._newest - self._held[engine]) if self._held[engine] else 1.0
        )
        if source == _TRAINER:
            self.trainer_bytes += size
            self._trainer_pulls += 1
        if self._weights.fan_out:
            end = now_s + size * self._weights.fan_out / self._weights.stream_bytes_per_s
        else:
            end = self._clock + size
        heapq.heappush(self._pulls, (end, next(self._numbers), engine, self._newest, source))

    def _rate(self) -> float:
        """Bytes a second of one direct pull."""
        return min(self._weights.stream_bytes_per_s, self._weights.egress_bytes_per_s / len(self._pulls))

    def _advance(self, now_s: float) -> None:
        passed_s, self._since_s = now_s - self._since_s, now_s
        if self._trainer_pulls:
            self.trainer_busy_s += passed_s
        if self._pulls and not self._weights.fan_out:
            self._clock += passed_s * self._rate()
