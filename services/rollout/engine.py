"""One engine as this gateway sees it: whether it may be called, how much it has to do, who waits for it."""

from __future__ import annotations

import asyncio
import dataclasses

from yarl import URL

from services.rollout.circuit import Circuit, CircuitLimits
from services.rollout.window import Load, Window, WindowLimits


@dataclasses.dataclass(eq=False)
class Engine:
    """One engine."""

    url: str
    window_limits: WindowLimits = dataclasses.field(default_factory=WindowLimits)
    circuit_limits: CircuitLimits = dataclasses.field(default_factory=CircuitLimits)
    ready: bool = False  # by its own word, and no call was turned away since
    contexts: int = 0  # open contexts that stay with it
    running: int = 0  # calls it is answering
    elsewhere: int = 0  # calls of others that it had when it last told its load
    policy_version: int = 0  # the newest that it has told of
    wanted: bool = False  # whether a call found no place since the last look
    suspected: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.root = URL(self.url)
        self.window = Window(self.window_limits)
        self.circuit = Circuit(self.circuit_limits)

    @property
    def load(self) -> int:
        """What it has to do: contexts that may call any moment, and what others ask of it."""
        return self.contexts + self.elsewhere

    def usable(self, now_s: float) -> bool:
        """Whether calls can be sent to it, room or none."""
        return self.ready and self.circuit.admits(now_s)

    def has_room(self, now_s: float) -> bool:
        """Whether a call can be sent to it now."""
        return self.usable(now_s) and self.running < self.window.size

    def observe(self, load: Load, *, asked_at: int) -> None:
        """Takes note of what it says of itself; `asked_at`: the calls that it was answering when it was asked."""
        if load.policy_version is not None:
            self.policy_version = load.policy_version
        self.elsewhere = max(0, load.running + load.waiting - max(asked_at, self.running))
        self.window.observe(load, calls=self.running, wanted=self.wanted)
        self.wanted = False
