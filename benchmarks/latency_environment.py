"""An environment that only waits: what a loop costs besides waiting shows against it.

Each step takes a lognormal time; after the last the reward is drawn. Both come from the task's seed and the number of
the session in this process, so that the episodes of a group differ.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random

from services.envs.environment import Action, Environment, Task, TimeStep, user

_sessions = itertools.count()


class Latency(Environment):
    """Waits a lognormal time at each step, then gives a random reward."""

    metric_names = ("latency_s",)

    def __init__(self, mean_s: float = 0.5, sigma: float = 1.0, turns: int = 4):
        """`mean_s` is the mean of a step's seconds, `sigma` the deviation of their logarithm."""
        if mean_s < 0 or sigma < 0 or turns < 1:
            raise ValueError("mean_s and sigma must be 0 or more, turns 1 or more")
        self._mu = math.log(mean_s) - sigma**2 / 2 if mean_s else -math.inf
        self._sigma = sigma
        self._turns_left = turns
        self._latency_s = 0.0

    async def reset(self, task: Task) -> TimeStep:
        self._draw = random.Random(f"{task.seed}/{next(_sessions)}")
        return TimeStep([user("guess a number")])

    async def step(self, action: Action) -> TimeStep:
        latency_s = self._draw.lognormvariate(self._mu, self._sigma)
        self._latency_s += latency_s
        await asyncio.sleep(latency_s)
        self._turns_left -= 1
        metrics = {"latency_s": self._latency_s}
        if self._turns_left:
            return TimeStep([user("higher")], metrics=metrics)
        return TimeStep([user("found")], reward=self._draw.random(), terminated=True, metrics=metrics)
