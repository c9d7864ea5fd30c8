"""How many calls a gateway keeps at an engine, learned from how the engine fares. Pure.

Additive increase, multiplicative decrease, as TCP shares a link among senders who do not know of each other
(https://www.cs.wustl.edu/~jain/papers/ftp/cong_av.pdf): gateways share an engine so, and none has to know the others.

    the engine has room, and calls wait for it here     the window doubles until its first cut, then grows by a step
    the engine's queue is long, twice in a row          it halves, but not below what the engine computes for us
    the cache is nearly full, or requests were retracted    it halves
    otherwise                                           it stays

A cut must have shown its effect, that is the calls must fit the window, before there is another. So the window neither
starves an engine nor swings between nothing and everything.
"""

from __future__ import annotations

import dataclasses
import math

_STEP = 8
_ROOMY, _FULL = 0.8, 0.95  # share of the key-value cache that running requests hold


@dataclasses.dataclass(frozen=True)
class Load:
    """What an engine says of itself. Raises ValueError when that cannot be."""

    policy_version: int | None
    running: int
    waiting: int
    kv_used: float  # share of the key-value cache, 0 to 1
    retracted: int = 0  # requests that lost their place in the cache, since the engine's start

    def __post_init__(self) -> None:
        counts = (self.policy_version or 0, self.running, self.waiting, self.retracted)
        if any(type(count) is not int or count < 0 for count in counts) or not 0 <= self.kv_used < math.inf:
            raise ValueError(f"no engine fares like this: {self}"[:300])


@dataclasses.dataclass(frozen=True)
class WindowLimits:
    """Bounds of a window, and where it begins."""

    least: int = 1
    first: int = 256
    most: int = 4096


class Window:
    """Of one gateway at one engine."""

    def __init__(self, limits: WindowLimits):
        self.size = limits.first
        self._limits = limits
        self._searching = True  # until the first cut
        self._queued_before = False
        self._retracted: int | None = None

    def observe(self, load: Load, *, calls: int, wanted: bool) -> None:
        """Takes note of a look at the engine.

        Args:
            load: what the engine says.
            calls: how many of ours it is answering.
            wanted: whether there have been calls that the window kept back since the last look.
        """
        queued = load.waiting > max(_STEP, load.running // 2)
        queued_twice, self._queued_before = queued and self._queued_before, queued
        retracted = self._retracted is not None and load.retracted > self._retracted
        self._retracted = load.retracted
        if calls > self.size:
            return  # the last cut has not shown yet
        half = min(self.size, calls) // 2
        if load.kv_used >= _FULL or retracted:
            self._cut(half)
        elif queued_twice:
            ours = math.ceil(load.running * calls / (load.running + load.waiting))
            self._cut(max(half, ours))
        elif wanted and load.kv_used < _ROOMY and not queued:
            self.size = min(self._limits.most, 2 * self.size if self._searching else self.size + _STEP)

    def _cut(self, size: int) -> None:
        self._searching = False
        self.size = max(self._limits.least, min(self.size, size))
