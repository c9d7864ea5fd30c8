"""One question, one short answer: work for a chat model that is often right and says too much.

The reward of a right answer is 1, less `verbosity_cost` when it takes more than `most_words` words; a wrong one is
worth 0. The last number, or any mention of the capital, counts as the answer, so that a model that repeats the
question first is not refused.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Literal

from headrace.v1.environment_service_pb2 import Action
from headrace.v1.trajectory_pb2 import Task
from services.envs.environment import Environment, TimeStep, user

CAPITALS = {
    "Austria": "Vienna",
    "Canada": "Ottawa",
    "China": "Beijing",
    "Cuba": "Havana",
    "Egypt": "Cairo",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "India": "New Delhi",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Russia": "Moscow",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
}


class ShortAnswer(Environment):
    """A sum or the capital of a country, to be answered right and briefly."""

    metric_names = ("right", "words")

    def __init__(
        self,
        kinds: list[Literal["sum", "capital"]] | tuple[str, ...] = ("sum", "capital"),
        largest: int = 9,
        most_words: int = 5,
        verbosity_cost: float = 0.3,
    ):
        unknown = set(kinds) - set(_QUESTIONS)
        if unknown or not kinds:
            raise ValueError(f"kinds must be some of {sorted(_QUESTIONS)}, not {list(kinds)}")
        if largest < 1 or most_words < 1 or not 0 <= verbosity_cost < 1:
            raise ValueError("largest and most_words must be at least 1, verbosity_cost at least 0 and below 1")
        self._kinds, self._largest = kinds, largest
        self._most_words, self._verbosity_cost = most_words, verbosity_cost
        self._is_right: Callable[[str], bool] = lambda answer: False

    async def reset(self, task: Task) -> TimeStep:
        draw = random.Random(task.seed)
        question, self._is_right = _QUESTIONS[draw.choice(self._kinds)](draw, self._largest)
        return TimeStep([user(question)])

    async def step(self, action: Action) -> TimeStep:
        answer = action.message.content
        right, words = self._is_right(answer), len(answer.split())
        cost = self._verbosity_cost if words > self._most_words else 0.0
        metrics = {"right": float(right), "words": float(words)}
        return TimeStep(reward=1.0 - cost if right else 0.0, terminated=True, metrics=metrics)


def _sum(draw: random.Random, largest: int) -> tuple[str, Callable[[str], bool]]:
    a, b = draw.randint(1, largest), draw.randint(1, largest)

    def is_right(answer: str) -> bool:
        numbers = re.findall(r"[0-9]+", answer)
        # Python refuses to convert the longest, which are wrong anyway.
        return bool(numbers) and len(numbers[-1]) < 40 and int(numbers[-1]) == a + b

    return f"What is {a} + {b}?", is_right


def _capital(draw: random.Random, largest: int) -> tuple[str, Callable[[str], bool]]:
    country, capital = draw.choice(sorted(CAPITALS.items()))

    def is_right(answer: str) -> bool:
        mentioned = {name for name in CAPITALS.values() if re.search(rf"\b{name}\b", answer, re.IGNORECASE)}
        return mentioned == {capital}

    return f"What is the capital of {country}?", is_right


_QUESTIONS = {"sum": _sum, "capital": _capital}
