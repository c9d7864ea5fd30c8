"""Environments that break, each in one way, for tests of everything that must survive them.

Name them as "tests.envs.faulty:Raises". All are the same game otherwise: `turns` user messages, then reward 0 or 1 by
the task's index. `share` is the part of the sessions that breaks, drawn anew for each session.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
from typing import Any

from services.envs.environment import Action, Environment, Task, TimeStep, user

_draw = random.Random(0)


class Sound(Environment):
    """Breaks in no way."""

    splits = {"train": 0, "test": 8}  # noqa: RUF012
    metric_names = ("turn",)

    def __init__(self, turns: int = 2, share: float = 1.0, when: str = "step"):
        self._turns = turns
        self._breaks = _draw.random() < share
        self._when = when
        self._turn = 0

    async def reset(self, task: Task) -> TimeStep:
        self._task = task
        return await self._at("reset", TimeStep([user("guess a number")]))

    async def step(self, action: Action) -> TimeStep:
        self._turn += 1
        metrics = {"turn": self._turn}
        if self._turn < self._turns:
            return await self._at("step", TimeStep([user("higher")], metrics=metrics))
        end = TimeStep([user("found")], reward=float(self._task.index % 2), terminated=True, metrics=metrics)
        return await self._at("end", await self._at("step", end))

    async def close(self) -> None:
        await self._at("close", None)

    async def _at(self, when: str, answer: Any) -> Any:
        return await self._break(answer) if self._breaks and self._when == when else answer

    async def _break(self, answer: Any) -> Any:
        return answer


class AwaitsCancelled(Sound):
    """Awaits a task of its own that was cancelled."""

    async def _break(self, answer: Any) -> Any:
        own = asyncio.ensure_future(asyncio.sleep(600))
        own.cancel("the simulator's")
        await own


class Raises(Sound):
    """Raises in reset, step, end or close."""

    async def _break(self, answer: Any) -> Any:
        raise RuntimeError("the simulator\nis out of fuel")


class Hangs(Sound):
    """Never answers."""

    async def _break(self, answer: Any) -> Any:
        await asyncio.Event().wait()


class Kills(Sound):
    """Kills its server's process."""

    async def _break(self, answer: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Exits(Sound):
    """Ends its server's process in Python's way."""

    async def _break(self, answer: Any) -> Any:
        raise SystemExit(3)


class NaNReward(Sound):
    """Gives a reward that is no number."""

    async def _break(self, answer: Any) -> Any:
        return TimeStep([user("higher")], reward=math.nan)


class InfiniteMetric(Sound):
    """Reports a metric that is infinite."""

    async def _break(self, answer: Any) -> Any:
        return TimeStep([user("higher")], metrics={"turn": math.inf})


class NoReward(Sound):
    """Ends the episode without ever giving a reward."""

    async def _break(self, answer: Any) -> Any:
        return TimeStep(terminated=True)


class Garbage(Sound):
    """Returns what is no time step."""

    async def _break(self, answer: Any) -> Any:
        return {"reward": "high"}


class Silent(Sound):
    """Leaves the episode open without a message."""

    async def _break(self, answer: Any) -> Any:
        return TimeStep()


class Slow(Sound):
    """Answers each step after a lognormal time of the given mean (seconds) and sigma."""

    def __init__(self, turns: int = 2, mean_s: float = 0.05, sigma: float = 1.0):
        super().__init__(turns)
        self._mean_s, self._sigma = mean_s, sigma

    async def step(self, action: Action) -> TimeStep:
        delay = random.lognormvariate(math.log(self._mean_s) - self._sigma**2 / 2, self._sigma)
        await asyncio.sleep(delay)
        return await super().step(action)
