"""services.envs.toy_text: Gymnasium's games in words, through a real server."""

import collections
import functools
import re

import pytest

from services.envs.environment import TimeStep
from services.envs.toy_text import ToyText
from tests.envs.conversation import Conversation, play, reset, say, serving

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def served(**options):
    return serving({"game": functools.partial(ToyText, **options)})


def lake(text: str) -> tuple[list[list[str]], tuple[int, int]]:
    """The map in a message, and where the agent is."""
    rows = [line.split() for line in text.splitlines() if re.fullmatch(r"\[?[SFHG]\]?( \[?[SFHG]\]?)+", line)]
    at = next((r, c) for r, row in enumerate(rows) for c, square in enumerate(row) if "[" in square)
    return [[square.strip("[]") for square in row] for row in rows], at


def way(text: str, avoid: str = "H") -> str:
    """The first move of a shortest way to G."""
    squares, start = lake(text)
    queue = collections.deque([(start, "")])
    seen = {start}
    while queue:
        (row, column), first = queue.popleft()
        if squares[row][column] == "G":
            return first
        for name, (down, right) in MOVES.items():
            there = (row + down, column + right)
            inside = 0 <= there[0] < len(squares) and 0 <= there[1] < len(squares)
            if inside and there not in seen and squares[there[0]][there[1]] not in avoid:
                seen.add(there)
                queue.append((there, first or name))
    raise AssertionError("no way")


@pytest.mark.parametrize("map_size", [0, 5])
async def test_who_finds_the_way_earns_1(map_size):
    async with served(arguments={"is_slippery": False}, map_size=map_size) as (stub, _):
        maps = set()
        for seed in range(4):
            request = reset("game", seed=seed)
            responses = await play(stub, request, lambda seen: say(f"I go {way(seen.messages[-1].content)}."))
            maps.add(responses[0].messages[0].content)
            assert responses[-1].terminated and sum(r.reward for r in responses) == 1.0
            assert responses[-1].metrics["steps"] == len(responses) - 1
        assert len(maps) == (4 if map_size else 1)


async def test_who_falls_into_a_hole_earns_0():
    async with served(arguments={"is_slippery": False}) as (stub, _):
        said = iter(["right", "down"])
        responses = await play(stub, reset("game"), lambda _: say(next(said)))
    assert responses[-1].terminated and sum(r.reward for r in responses) == 0.0


async def test_replies_without_an_action_count_against_the_limit():
    async with served(arguments={"max_episode_steps": 3}) as (stub, _):
        said = iter(["", "left", "?"])
        responses = await play(stub, reset("game"), lambda _: say(next(said)))
    assert responses[-1].truncated and responses[-1].metrics == {"steps": 1.0, "invalid_actions": 2.0}


async def test_the_games_own_limit_truncates_and_is_not_termination():
    async with served(arguments={"is_slippery": False, "max_episode_steps": 3}) as (stub, _):
        responses = await play(stub, reset("game"), lambda _: say("left"))
    assert [r.truncated for r in responses] == [False, False, False, True] and not responses[-1].terminated
    assert responses[-1].HasField("reward") and responses[-1].reward == 0.0


async def test_a_reply_without_an_action_is_answered_and_charged_as_the_game_charges():
    for name, cost in [("FrozenLake-v1", 0.0), ("Taxi-v4", -1.0)]:
        async with served(id=name) as (stub, _):
            conversation = Conversation(stub)
            await conversation.send(reset("game"))
            for text in ["", "upwards", "\0", "x" * 50_000]:
                response = await conversation.send(say(text))
                assert "names no action" in response.messages[0].content and response.reward == cost
            assert response.metrics == {"steps": 0.0, "invalid_actions": 4.0}


async def test_the_last_action_named_counts():
    async with served(arguments={"is_slippery": False}) as (stub, _):
        conversation = Conversation(stub)
        await conversation.send(reset("game"))
        moved = await conversation.send(say("Left and up are walls. I go RIGHT"))
    assert lake(moved.messages[0].content)[1] == (0, 1)


async def test_taxi_pays_20_for_the_ride_and_charges_each_step():
    def drive(response) -> str:
        text = response.messages[-1].content
        row, column = (int(found) for found in re.search(r"row (\d), column (\d)", text).groups())
        waiting, wanted = re.search(r"waiting at (\w)", text), re.search(r"go to (\w)", text)[1]
        goal = {"R": (0, 0), "G": (0, 4), "Y": (4, 0), "B": (4, 3)}[waiting[1] if waiting else wanted]
        if (row, column) == goal:
            return "pickup" if waiting else "dropoff"
        # Row 2 has no walls: change columns there.
        if column != goal[1]:
            return ("east" if column < goal[1] else "west") if row == 2 else ("south" if row < 2 else "north")
        return "south" if row < goal[0] else "north"

    async with served(id="Taxi-v4") as (stub, _):
        for seed in range(4):
            responses = await play(stub, reset("game", seed=seed), lambda seen: say(drive(seen)))
            total = sum(r.reward for r in responses)
            assert responses[-1].terminated and total == 21 - (len(responses) - 1)


async def test_blackjack_and_the_cliff_are_told_in_words():
    async with served(id="Blackjack-v1") as (stub, _):
        responses = await play(stub, reset("game", seed=1), lambda _: say("stick"))
        assert re.search(r"Your cards count \d+.*; the dealer shows", responses[0].messages[0].content)
        assert responses[-1].reward in (-1.0, 0.0, 1.0) and len(responses) == 2
    async with served(id="CliffWalking-v1") as (stub, _):
        said = iter(["up", *["right"] * 11, "down"])
        responses = await play(stub, reset("game"), lambda _: say(next(said)))
        assert responses[-1].terminated and sum(r.reward for r in responses) == -13


async def test_the_same_task_is_the_same_game():
    async with served(map_size=4) as (stub, _):  # slippery: every step is a draw

        async def episode(seed: int) -> list:
            said = iter(["right", "down"] * 60)
            return await play(stub, reset("game", seed=seed), lambda _: say(next(said)))

        assert [await episode(seed) for seed in range(4)] == [await episode(seed) for seed in range(4)]
        assert await episode(0) != await episode(1)


async def test_a_game_that_is_not_listed_is_played_by_numbers():
    import gymnasium
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

    gymnasium.register("Pond-v0", entry_point=FrozenLakeEnv, kwargs={"is_slippery": False}, max_episode_steps=10)
    environment = ToyText("Pond-v0")
    step: TimeStep = await environment.reset(reset("game").reset)
    assert "Reply with one action: 0, 1, 2, 3." in step.messages[0].content
    assert (await environment.step(say("2").action)).messages[0].content == "1"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"id": "Chess-v9"}, "cannot make Chess-v9"),
        ({"id": "Pendulum-v1"}, "not a few that have names"),
        ({"id": "Taxi-v4", "map_size": 4}, "is for FrozenLake"),
        ({"map_size": 1}, "must be 2 or more"),
    ],
)
def test_options_that_make_no_game_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        ToyText(**options)
