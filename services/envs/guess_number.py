"""Guess the number: an agent asks for a secret number and hears whether it is higher or lower."""

from __future__ import annotations

import random
import re
from typing import Literal, get_args

from services.envs.environment import Action, Environment, Message, Task, TimeStep, assistant, user

Feedback = Literal["direction", "blind"]


class GuessNumber(Environment):
    """Guess a secret number from higher/lower feedback.

    A guess is the first whole number in the reply. Reward 1 when the secret is found within the turns, 0 when they are
    used up: the turn limit is a rule of the game, so both terminate. A policy that ignores the feedback finds at most
    `turns` of `numbers` secrets, one that halves the range any of 2**turns - 1. With blind feedback "higher" and
    "lower" are drawn from the task's seed whatever the guess, as a control: no policy can then pass turns / numbers.
    """

    metric_names = ("guesses", "invalid_guesses")

    def __init__(self, numbers: int = 8, turns: int = 4, feedback: Feedback = "direction"):
        """Secrets are 1 to `numbers`. Raises ValueError for options that make no game."""
        if numbers < 2 or turns < 1 or feedback not in get_args(Feedback):
            raise ValueError(f"numbers must be 2 or more, turns 1 or more, feedback one of {get_args(Feedback)}")
        self.splits = {"train": numbers, "test": numbers}
        self._numbers = numbers
        self._turns = turns
        self._feedback = feedback
        self._guesses = 0
        self._invalid = 0
        self._lowest, self._highest = 1, numbers

    async def reset(self, task: Task) -> TimeStep:
        self._secret = task.index % self._numbers + 1
        self._draw = random.Random(task.seed)
        return TimeStep([user(f"guess a number from 1 to {self._numbers}")])

    async def step(self, action: Action) -> TimeStep:
        self._guesses += 1
        guess = _first_number(action.message.content)
        valid = guess is not None and 1 <= guess <= self._numbers
        self._invalid += not valid
        metrics = {"guesses": self._guesses, "invalid_guesses": self._invalid}
        if guess == self._secret:
            return TimeStep([user("found")], reward=1.0, terminated=True, metrics=metrics)
        answer = self._answer(guess) if guess is not None and valid else "invalid"
        if self._guesses == self._turns:
            return TimeStep([user(answer)], reward=0.0, terminated=True, metrics=metrics)
        return TimeStep([user(answer)], metrics=metrics)

    async def demonstrate(self) -> Message | None:
        """Halves what the feedback leaves; there is no expert for blind feedback."""
        return None if self._feedback == "blind" else assistant(str((self._lowest + self._highest) // 2))

    def _answer(self, guess: int) -> str:
        if self._feedback == "blind":
            return self._draw.choice(("higher", "lower"))
        if guess < self._secret:
            self._lowest = max(self._lowest, guess + 1)
            return "higher"
        self._highest = min(self._highest, guess - 1)
        return "lower"


def _first_number(text: str) -> int | None:
    found = re.search(r"[0-9]+", text)
    # Longer ones are out of any range, and Python refuses to convert the longest.
    return int(found[0][:18]) if found else None
