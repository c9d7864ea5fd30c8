"""An environment of one long reply, for tests of what many sampled tokens must hold."""

from __future__ import annotations

from services.envs.environment import Action, Environment, Task, TimeStep, user


class Monologue(Environment):
    """Asks for anything and rewards replies of an even number of words."""

    async def reset(self, task: Task) -> TimeStep:
        return TimeStep([user("w1 w2 w3")])

    async def step(self, action: Action) -> TimeStep:
        return TimeStep(reward=float(len(action.message.content.split()) % 2 == 0), terminated=True)
