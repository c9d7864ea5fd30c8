"""An engine that batches: all its running requests decode together, each at the pace of the batch.

A clock counts decode steps instead of seconds. A request of n tokens that starts at step v ends at step v + n, however
the batch changes meanwhile; only the pace of the clock does. So an engine costs a few heap operations a request, not
one a token. A prefill and a swap of weights hold the clock.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from benchmarks.pipeline_model.plan import EngineSpeed

_TOLERANCE = 1e-6  # of a decode step


@dataclass(slots=True)
class Request:
    """One turn's generation."""

    owner: Any
    tokens: float
    start_step: float = 0.0
    start_epoch: int = 0  # number of the engine's swaps when it started


class Engine:
    """One replica."""

    def __init__(self, speed: EngineSpeed):
        self._speed = speed
        self._running: list[tuple[float, int, Request]] = []
        self._waiting: deque[Request] = deque()
        self._numbers = itertools.count()
        self._step, self._since_s = 0.0, 0.0
        # Steps at which weights were swapped, and the version from each on.
        self._swaps: list[tuple[float, int]] = [(0.0, 0)]
        self.attached = 0  # episodes that are at home here
        self.stalled_s = 0.0
        self.decoded = 0.0  # tokens

    @property
    def version(self) -> int:
        """Of its weights."""
        return self._swaps[-1][1]

    def submit(self, now_s: float, request: Request) -> None:
        """A request comes."""
        self._advance(now_s)
        if len(self._running) < self._speed.max_running:
            self._start(request)
        else:
            self._waiting.append(request)

    def finish(self, now_s: float) -> list[Request]:
        """Takes out the requests that have ended by now, and starts those that waited."""
        self._advance(now_s)
        ended = []
        while self._running and self._running[0][0] <= self._step + _TOLERANCE:
            ended.append(heapq.heappop(self._running)[2])
        while self._waiting and len(self._running) < self._speed.max_running:
            self._start(self._waiting.popleft())
        return ended

    def next_end_s(self) -> float:
        """When the next request ends, if nothing else happens; infinity when none runs. After submit or finish."""
        if not self._running:
            return math.inf
        steps = self._running[0][0] - self._step
        return self._since_s + max(steps, 0.0) * self._speed.step_s(len(self._running))

    def swap(self, now_s: float, version: int, pause_s: float) -> None:
        """Stands still, then goes on with other weights."""
        self._advance(now_s)
        self._hold(pause_s)
        self._swaps.append((self._step, version))

    def tokens_by_version(self, request: Request) -> list[tuple[int, float]]:
        """(version, tokens) of an ended request, oldest first."""
        end = request.start_step + request.tokens
        spans = self._swaps[request.start_epoch :]
        bounds = [request.start_step, *(max(step, request.start_step) for step, _ in spans[1:]), end]
        pairs = zip(spans, bounds[:-1], bounds[1:], strict=True)
        return [(version, min(upper, end) - lower) for (_, version), lower, upper in pairs if min(upper, end) > lower]

    def _start(self, request: Request) -> None:
        self._hold(self._speed.prefill_s)
        request.start_step, request.start_epoch = self._step, len(self._swaps) - 1
        heapq.heappush(self._running, (self._step + request.tokens, next(self._numbers), request))

    def _hold(self, seconds: float) -> None:
        self._since_s += seconds
        self.stalled_s += seconds

    def _advance(self, now_s: float) -> None:
        if now_s <= self._since_s:
            return
        running = len(self._running)
        if running:
            steps = (now_s - self._since_s) / self._speed.step_s(running)
            self._step += steps
            self.decoded += steps * running
        self._since_s = now_s
