"""A task of one question and one answer, from one function: it makes the question and says how to verify the answer.

    @single_turn(splits={"train": 0, "test": 100})
    def addition(task: Task, draw: random.Random, largest: int = 9) -> Question:
        '''Adds two numbers.'''
        a, b = draw.randint(0, largest), draw.randint(0, largest)
        return Question(f"What is {a} + {b}?", lambda answer: answer.strip() == str(a + b))

`addition` is an Environment then: serve it as `my_module:addition`; the parameters after the second are its options.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from services.envs.environment import Action, Environment, Message, Task, TimeStep, assistant, task_random, user


@dataclass(frozen=True)
class Verdict:
    """A reward with numbers worth reporting, for a verifier that tells more than a reward."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """One task."""

    prompt: str | Sequence[Message]
    verify: Callable[[str], Any]
    """Takes the text of the answer; gives a bool, a finite number or a Verdict, or awaits one."""
    demonstration: str | None = None
    """A right answer; None: there is no expert."""


Maker = Callable[..., Question | Awaitable[Question]]


def single_turn(
    *, splits: Mapping[str, int] = MappingProxyType({"train": 0}), metric_names: Sequence[str] = ()
) -> Callable[[Maker], type[Environment]]:
    """Makes an Environment of a function `(task, draw, **options) -> Question`, sync or async.

    `draw` is seeded by the task: the same task draws the same. Options are checked when an object is made.
    """
    declared_splits, declared_metrics = splits, metric_names

    def decorate(make: Maker) -> type[Environment]:
        signature = inspect.signature(make)

        class SingleTurn(Environment):
            splits = declared_splits
            metric_names = declared_metrics

            def __init__(self, **options: Any):
                signature.bind(None, None, **options)  # a TypeError here names the wrong option at start
                self._options = options

            async def reset(self, task: Task) -> TimeStep:
                made = make(task, task_random(task), **self._options)
                self._question = await made if inspect.isawaitable(made) else made
                prompt = self._question.prompt
                return TimeStep([user(prompt)] if isinstance(prompt, str) else prompt)

            async def step(self, action: Action) -> TimeStep:
                judged = self._question.verify(action.message.content)
                verdict = await judged if inspect.isawaitable(judged) else judged
                if not isinstance(verdict, Verdict):
                    verdict = Verdict(float(verdict))
                return TimeStep(reward=verdict.reward, terminated=True, metrics=verdict.metrics)

            async def demonstrate(self) -> Message | None:
                right = self._question.demonstration
                return None if right is None else assistant(right)

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(SingleTurn, name, getattr(make, name))
        return SingleTurn

    return decorate
