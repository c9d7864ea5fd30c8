"""Gymnasium's toy-text games, played in words: FrozenLake, Taxi, Blackjack, CliffWalking and others of few actions.

The prompt holds the rules and the state as text; an action is the last word of the reply that names one; each answer
is the new state. Rewards are Gymnasium's own, step by step: an episode is worth their sum. Its `terminated` and
`truncated` (its own limit of steps, against which a reply without an action counts as well) pass through unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.envs.toy_text import frozen_lake

from services.envs.environment import Action, Environment, Task, TimeStep, task_random, user


@dataclass(frozen=True)
class Game:
    """What Gymnasium does not say of a game in text."""

    actions: tuple[str, ...]
    """The word for each number."""
    rules: str
    describe: Callable[[Any, Any], str]
    """Takes the Gymnasium environment and an observation."""
    idle_reward: float = 0.0
    """For a reply that names no action: what the game charges for a step, or saying nothing would be free."""


class ToyText(Environment):
    """Play a toy-text game of Gymnasium by naming one action in each message."""

    metric_names = ("steps", "invalid_actions")

    def __init__(
        self,
        id: str = "FrozenLake-v1",
        arguments: Mapping[str, Any] | None = None,
        map_size: int = 0,
        idle_reward: float | None = None,
    ):
        """Raises ValueError for what Gymnasium cannot make, or what has no discrete actions.

        Args:
            id: Gymnasium's name of the game; "module:Name" imports the module that registers it.
            arguments: of `gymnasium.make`, for example {"is_slippery": false}.
            map_size: FrozenLake only: each task draws its own map of so many rows and columns; 0: the one map.
            idle_reward: for a reply that names no action; empty: what the game charges for a step.
        """
        if map_size and (not id.startswith("FrozenLake") or map_size < 2):
            raise ValueError("map_size must be 2 or more, and is for FrozenLake")
        self._id = id
        self._arguments = dict(arguments or {})
        self._map_size = map_size
        self._world = self._make({})
        self._game = GAMES.get(id.partition("-")[0]) or _unknown(self._world)
        self._idle_reward = self._game.idle_reward if idle_reward is None else idle_reward
        self._limit = self._world.spec.max_episode_steps
        self._steps = 0
        self._invalid = 0

    async def reset(self, task: Task) -> TimeStep:
        seed = task_random(task).getrandbits(31)
        if self._map_size:
            self._world.close()
            self._world = self._make({"desc": frozen_lake.generate_random_map(self._map_size, seed=seed)})
        observation, _ = self._world.reset(seed=seed)
        state = self._game.describe(self._world.unwrapped, observation)
        names = ", ".join(self._game.actions)
        return TimeStep([user(f"{self._game.rules}\n\n{state}\n\nReply with one action: {names}.")])

    async def step(self, action: Action) -> TimeStep:
        chosen = _last_action(action.message.content, self._game.actions)
        if chosen is None:
            self._invalid += 1
            answer = f"That names no action. Reply with one of: {', '.join(self._game.actions)}."
            truncated = self._limit is not None and self._steps + self._invalid >= self._limit
            return TimeStep([user(answer)], reward=self._idle_reward, truncated=truncated, metrics=self._metrics())
        self._steps += 1
        observation, reward, terminated, truncated, _ = self._world.step(chosen)
        return TimeStep(
            [user(self._game.describe(self._world.unwrapped, observation))],
            reward=float(reward),
            terminated=bool(terminated),
            truncated=not terminated and (bool(truncated) or self._steps + self._invalid == self._limit),
            metrics=self._metrics(),
        )

    async def close(self) -> None:
        self._world.close()

    def _metrics(self) -> dict[str, float]:
        return {"steps": self._steps, "invalid_actions": self._invalid}

    def _make(self, arguments: Mapping[str, Any]) -> Any:
        try:
            world = gymnasium.make(self._id, **self._arguments, **arguments)
        except (gymnasium.error.Error, ImportError) as error:
            raise ValueError(f"gymnasium cannot make {self._id}: {error}") from error
        if not isinstance(world.action_space, gymnasium.spaces.Discrete):
            raise ValueError(f"{self._id} has the actions {world.action_space}, not a few that have names")
        return world


def _last_action(text: str, names: tuple[str, ...]) -> int | None:
    """The number of the action that the text names last, as a word of its own."""
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    found = re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", text.lower())
    return names.index(found[-1]) if found else None


def _grid(world: Any, state: Any) -> str:
    """FrozenLake's map, the agent's square in brackets."""
    columns = world.ncol
    rows = [[square.decode() for square in row] for row in world.desc]
    row, column = divmod(int(state), columns)
    rows[row][column] = f"[{rows[row][column]}]"
    return "\n".join(" ".join(line) for line in rows)


def _cliff(world: Any, state: Any) -> str:
    rows, columns = world.shape
    squares = [["C" if world._cliff[row, column] else "." for column in range(columns)] for row in range(rows)]
    squares[-1][-1] = "G"
    row, column = divmod(int(state), columns)
    squares[row][column] = "A"
    return "\n".join(" ".join(line) for line in squares)


def _taxi(world: Any, state: Any) -> str:
    row, column, passenger, destination = (int(part) for part in world.decode(int(state)))
    streets = "\n".join(b"".join(line).decode() for line in world.desc)
    where = "in the taxi" if passenger == len(_STANDS) else f"waiting at {_STANDS[passenger]}"
    return (
        f"{streets}\nThe taxi is in row {row}, column {column} (both from 0, row 0 at the top). "
        f"The passenger is {where} and wants to go to {_STANDS[destination]}."
    )


def _cards(world: Any, observation: Any) -> str:
    total, dealer, ace = observation
    holding = f"Your cards count {int(total)}{', with an ace as 11' if ace else ''}"
    return f"{holding}; the dealer shows {'an ace' if dealer == 1 else int(dealer)}."


def _unknown(world: Any) -> Game:
    """A game that is not listed below: its actions are numbers."""
    numbers = range(int(world.action_space.start), int(world.action_space.start + world.action_space.n))
    if world.action_space.start != 0:
        raise ValueError(f"the actions of {world.spec.id} do not start at 0")
    return Game(tuple(str(number) for number in numbers), f"This is {world.spec.id}.", lambda _, seen: str(seen))


_STANDS = "RGYB"

GAMES = {
    "FrozenLake": Game(
        actions=("left", "down", "right", "up"),
        rules="Cross the frozen lake from S to G, over F (ice), and never step on H (a hole). The brackets mark where "
        "you are.",
        describe=_grid,
    ),
    "CliffWalking": Game(
        actions=("up", "right", "down", "left"),
        rules="Walk from the lower left corner to G. You are at A. C is a cliff: stepping on it costs 100 and takes "
        "you back to the start; every other step costs 1.",
        describe=_cliff,
        idle_reward=-1.0,
    ),
    "CliffWalkingSlippery": Game(
        actions=("up", "right", "down", "left"),
        rules="Walk from the lower left corner to G. You are at A, and the ground is slippery. C is a cliff: stepping "
        "on it costs 100 and takes you back to the start; every other step costs 1.",
        describe=_cliff,
        idle_reward=-1.0,
    ),
    "Taxi": Game(
        actions=("south", "north", "east", "west", "pickup", "dropoff"),
        rules="Drive the taxi to the passenger, pick the passenger up, drive to the destination and drop the passenger "
        "off there, which earns 20. Every step costs 1, a wrong pickup or dropoff 10. | are walls, : can be crossed.",
        describe=_taxi,
        idle_reward=-1.0,
    ),
    "Blackjack": Game(
        actions=("stick", "hit"),
        rules="Play blackjack: come closer to 21 than the dealer, and not above it. Hit to take a card, stick to stop.",
        describe=_cards,
    ),
}
