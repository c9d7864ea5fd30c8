"""TextArena's single-player games: GuessTheNumber, TowerOfHanoi, Mastermind, Sudoku, Minesweeper, 2048 and others.

A reply goes to the game as it is (most take a move in square brackets, as the prompt says), and each answer holds what
the game said since, not the whole history again. The game gives its reward at its end. Most give a share of 1 for an
unfinished task; with `partial_credit` off, what is not solved is worth 0.

TextArena draws from Python's one global generator, which all episodes of a process would share and disturb. So each
episode keeps a state of that generator of its own, in place during its calls only. Some games search for seconds until
they have a board: these begin in worker processes, and come back as pickles. All else takes microseconds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import textarena

from services.envs.environment import Action, Environment, Message, Task, TimeStep, task_random, user

# Games that search for a board, for as long as 5 s.
SEARCHED = frozenset({"RushHour", "Sokoban", "Sudoku"})


class TextGame(Environment):
    """Play a single-player game of TextArena."""

    metric_names = ("turns", "solved", "invalid_move")

    def __init__(
        self,
        id: str = "GuessTheNumber-v0",
        arguments: Mapping[str, Any] | None = None,
        partial_credit: bool = True,
    ):
        """Raises ValueError for what is no single-player game that works here.

        Args:
            id: TextArena's name of the game.
            arguments: of the game, for example {"max_turns": 10}; they replace what the name stands for.
            partial_credit: keep the game's own reward; else 1 for a full one and 0 for anything less.
        """
        _check(id, json.dumps(dict(arguments or {}), sort_keys=True))
        self._id, self._arguments = id, dict(arguments or {})
        self._partial_credit = partial_credit
        self._turns = 0

    async def reset(self, task: Task) -> TimeStep:
        seed = task_random(task).getrandbits(32)
        if self._id.partition("-")[0] in SEARCHED:
            self._game, self._generator = await self.blocking(begin, self._id, self._arguments, seed)
        else:
            others = random.getstate()
            try:
                self._game, self._generator = begin(self._id, self._arguments, seed)
            finally:
                random.setstate(others)
        return TimeStep(self._said())

    async def step(self, action: Action) -> TimeStep:
        self._turns += 1
        with self._own_generator():
            done, _ = self._game.step(action.message.content)
            said = self._said()
        if not done:
            return TimeStep(said, metrics={"turns": self._turns})
        rewards, about = self._game.close()
        reward = float(rewards[0])
        solved = float(reward >= 1)
        metrics = {"turns": self._turns, "solved": solved, "invalid_move": float(about[0]["invalid_move"])}
        return TimeStep(said, reward=reward if self._partial_credit else solved, terminated=True, metrics=metrics)

    @contextlib.contextmanager
    def _own_generator(self) -> Iterator[None]:
        others = random.getstate()
        random.setstate(self._generator)
        try:
            yield
        finally:
            self._generator = random.getstate()
            random.setstate(others)

    def _said(self) -> list[Message]:
        """What the game has said since the last call, without the policy's own words."""
        _, observations = self._game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        said = [text for _, text, kind in observations if kind is not own]
        return [user("\n".join(said).strip() or "Continue.")]


def begin(id: str, arguments: Mapping[str, Any], seed: int) -> tuple[Any, Any]:
    """A game that has been reset, and the global generator's state, which that has changed."""
    game = _make(id, arguments)
    random.seed(seed)
    game.reset(num_players=1, seed=seed)
    return game, random.getstate()


def _make(id: str, arguments: Mapping[str, Any]) -> Any:
    game = textarena.make(id, **arguments)
    while isinstance(game, textarena.Wrapper):  # the wrappers repeat the whole history in every answer
        game = game.env
    return game


@functools.lru_cache(maxsize=64)
def _check(id: str, arguments_json: str) -> None:
    """Starts the game once. Raises ValueError, in one line."""
    others = random.getstate()
    try:
        game = _make(id, json.loads(arguments_json))
        game.reset(num_players=1, seed=0)
        single = isinstance(game.state, textarena.SinglePlayerState)
    except Exception as error:  # games fail in every way: absent data and keys, wrong arguments, players that lack
        line = " ".join(str(error).strip("* \n").split())[:200] or type(error).__name__
        raise ValueError(f"{id} cannot be played here by one player: {line}") from error
    finally:
        random.setstate(others)
    if not single:
        raise ValueError(f"{id} is no single-player game")
