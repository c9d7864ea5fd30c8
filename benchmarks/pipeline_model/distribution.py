"""How versions of the weights reach the engines: from the trainer alone, or from one another.

    direct     each engine pulls from the trainer; the pulls share its network evenly, so they all end late
    fan-out    the first engine pulls from the trainer, the others from engines before them, `fan_out` from each: a
               tree. A tensor is passed on as soon as it has come whole, so a level of the tree costs a tensor's time.
               Engines that hold different versions, and so get different deltas, make different trees.

An engine pulls the newest version that there is when its last pull has ended: a slow one passes versions over. The
caller is told when something here will happen next (`next_s`) and then asks what has (`arrived`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from typing import NamedTuple

from benchmarks.pipeline_model.plan import Weights

_TOLERANCE_S = 1e-9


class _Pull(NamedTuple):
    engine: int
    version: int
    from_trainer: bool


class Distribution:
    """All engines' pulls."""

    def __init__(self, weights: Weights, engines: int):
        self._weights = weights
        self._held = [0] * engines
        self._idle = set(range(engines))
        self._newest = 0
        self._numbers = itertools.count()
        # Direct: (share of the link's clock at which it ends, …). Fan-out: (second at which it ends, …).
        self._pulls: list[tuple[float, int, _Pull]] = []
        self._clock, self._since_s = 0.0, 0.0
        # By the version that a delta is to: when each engine of the tree that has places left will have all, in order.
        self._trees: dict[int, deque[float]] = {}
        self.trainer_bytes = 0.0
        self.trainer_busy_s = 0.0
        self._trainer_pulls = 0

    def announce(self, now_s: float, version: int) -> None:
        """A version is out."""
        self._advance(now_s)
        self._newest, self._trees = version, {}
        waiting = sorted(self._idle)
        self._idle.clear()
        for engine in waiting:
            self._pull(now_s, engine)

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
        ended = []
        while self._pulls and self.next_s() <= now_s + _TOLERANCE_S:
            pull = heapq.heappop(self._pulls)[2]
            self._trainer_pulls -= pull.from_trainer
            self._held[pull.engine] = pull.version
            ended.append((pull.engine, pull.version))
        return ended

    def installed(self, now_s: float, engine: int) -> None:
        """The engine has swapped what it pulled, and is free to pull again."""
        self._advance(now_s)
        if self._held[engine] < self._newest:
            self._pull(now_s, engine)
        else:
            self._idle.add(engine)

    def _pull(self, now_s: float, engine: int) -> None:
        held, weights = self._held[engine], self._weights
        share = min(1.0, weights.delta_fraction * (self._newest - held)) if held else 1.0
        size = share * weights.size_bytes
        tree = self._trees.setdefault(held if share < 1.0 else 0, deque())
        from_trainer = not (weights.fan_out and tree)
        if from_trainer:
            self._trainer_pulls += 1
            self.trainer_bytes += size
        if not weights.fan_out:
            end = self._clock + size
        elif from_trainer:
            end = now_s + size / min(weights.stream_bytes_per_s, weights.egress_bytes_per_s)
        else:
            pace_s = size * weights.fan_out / weights.stream_bytes_per_s
            end = max(now_s + pace_s, tree.popleft() + weights.piece_fraction * pace_s)
        tree.extend([end] * weights.fan_out)
        heapq.heappush(self._pulls, (end, next(self._numbers), _Pull(engine, self._newest, from_trainer)))

    def _rate(self) -> float:
        """Bytes a second of one direct pull."""
        return min(self._weights.stream_bytes_per_s, self._weights.egress_bytes_per_s / len(self._pulls))

    def _advance(self, now_s: float) -> None:
        passed_s, self._since_s = now_s - self._since_s, now_s
        if self._trainer_pulls:
            self.trainer_busy_s += passed_s
        if self._pulls and not self._weights.fan_out:
            self._clock += passed_s * self._rate()
