"""When an engine that keeps failing is left alone, and how it is tried again. Pure: the time comes in.

    closed      calls go through; `failures` of them in a row open it
    open        no call goes through until a growing time has passed
    half open   one call goes through: its success closes the circuit, its failure opens it for twice as long

Only the one call of a half-open circuit decides. Those that were under way when it opened tell nothing new.
"""

from __future__ import annotations

import dataclasses
import enum
import random


class State(enum.IntEnum):
    """Of a circuit; the number is what the metric shows."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclasses.dataclass(frozen=True)
class CircuitLimits:
    """When it opens and for how long."""

    failures: int = 5
    first_s: float = 0.5
    longest_s: float = 30.0


class Circuit:
    """Of one engine."""

    def __init__(self, limits: CircuitLimits):
        self.until_s = 0.0  # when an open one becomes half open
        self._limits = limits
        self._failures = 0  # in a row, while closed
        self._openings = 0  # in a row; 0: closed
        self._probing = False

    def state(self, now_s: float) -> State:
        if not self._openings:
            return State.CLOSED
        return State.HALF_OPEN if now_s >= self.until_s else State.OPEN

    def admits(self, now_s: float) -> bool:
        """Whether a call may go through now."""
        state = self.state(now_s)
        return state is State.CLOSED or (state is State.HALF_OPEN and not self._probing)

    def enter(self, now_s: float) -> bool:
        """A call goes through. Returns whether it is the one that decides; its end must be told with that word."""
        probe = self.state(now_s) is State.HALF_OPEN
        self._probing = self._probing or probe
        return probe

    def succeeded(self, *, probe: bool) -> None:
        """The engine answered."""
        if probe:
            self._probing = False
            self._openings = 0
        if not self._openings:
            self._failures = 0

    def failed(self, now_s: float, *, probe: bool) -> bool:
        """The engine did not answer, or with nonsense. Returns whether the circuit opened by that."""
        if probe:
            self._probing = False
        elif self._openings:
            return False
        else:
            self._failures += 1
            if self._failures < self._limits.failures:
                return False
        self._openings += 1
        pause_s = min(self._limits.longest_s, self._limits.first_s * 2.0 ** min(self._openings - 1, 30))
        self.until_s = now_s + pause_s * random.uniform(0.75, 1)  # so that gateways do not try it all at once
        return True

    def left(self, *, probe: bool) -> None:
        """The call was given up; it says nothing of the engine."""
        if probe:
            self._probing = False

    def try_now(self, now_s: float) -> None:
        """The engine came back by its own word: an open circuit becomes half open at once."""
        self.until_s = min(self.until_s, now_s)
