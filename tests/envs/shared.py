"""Environments whose episodes share what their server sets up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from services.envs.environment import Action, Environment, Task, TimeStep, user


class Shared(Environment):
    """Says what it shares."""

    def __init__(self, record: str, words: int = 1, setup_s: float = 0.0):
        self._record, self._words, self._setup_s = Path(record), words, setup_s

    @contextlib.asynccontextmanager
    async def setup(self) -> AsyncIterator[str]:
        self._note("open")
        try:
            await asyncio.sleep(self._setup_s)
            yield f"set up once of {self._words}"
        finally:
            self._note("closed")

    async def reset(self, task: Task) -> TimeStep:
        return TimeStep([user(self.shared)])

    async def step(self, action: Action) -> TimeStep:
        return TimeStep(reward=1.0, terminated=True)

    def _note(self, word: str) -> None:
        with self._record.open("a") as record:
            record.write(f"{word}\n")


class Unable(Shared):
    """Cannot be set up."""

    def __init__(self) -> None:
        super().__init__("/dev/null")

    @contextlib.asynccontextmanager
    async def setup(self) -> AsyncIterator[str]:
        raise OSError("the port of the simulator\nis taken")
        yield ""
