"""services.envs.text_games: TextArena's single-player games through a real server."""

import asyncio
import functools
import random
import re

import pytest

from headrace.v1 import environment_service_pb2 as pb
from services.envs.text_games import TextGame
from tests.envs.conversation import Conversation, play, reset, say, serving


def served(**options):
    return serving({"game": functools.partial(TextGame, **options)})


class Halving:
    """Guesses the middle of what the hints leave."""

    def __init__(self):
        self.lowest, self.highest = 1, 20

    def __call__(self, seen):
        text = seen.messages[-1].content
        if "is higher" in text:
            self.lowest = self.guess + 1
        elif "is lower" in text:
            self.highest = self.guess - 1
        self.guess = (self.lowest + self.highest) // 2
        return say(f"I think it is [{self.guess}]")


async def test_who_reads_the_hints_earns_1():
    async with served() as (stub, _):
        for seed in range(8):
            responses = await play(stub, reset("game", seed=seed), Halving())
            assert responses[-1].terminated and responses[-1].reward == 1.0
            assert responses[-1].metrics == {"turns": len(responses) - 1, "solved": 1.0, "invalid_move": 0.0}
            assert len(responses) <= 6 and not any(r.HasField("reward") for r in responses[:-1])


async def test_who_solves_hanoi_earns_1_and_who_does_not_0():
    moves = ["A C", "A B", "C B", "A C", "B A", "B C", "A C"]
    async with served(id="TowerOfHanoi-v0") as (stub, _):
        said = iter(moves)
        solved = await play(stub, reset("game"), lambda _: say(f"[{next(said)}]"))
        assert solved[-1].reward == 1.0 and "A: [3, 2, 1]" in solved[0].messages[0].content
        lost = await play(stub, reset("game"), lambda _: say("I do not know"))
        assert lost[-1].reward == 0.0 and lost[-1].terminated and lost[-1].metrics["invalid_move"] == 1.0


@pytest.mark.parametrize(("partial", "expected"), [(True, 1 / 3), (False, 0.0)])
async def test_a_share_of_the_task_is_a_share_of_the_reward_unless_switched_off(partial, expected):
    # One disk lies on C when the turns are used up.
    async with served(id="TowerOfHanoi-v0", arguments={"max_turns": 6}, partial_credit=partial) as (stub, _):
        said = iter(["A C", "A B", "C B", "A C", "B A", "A B", "B A"])
        responses = await play(stub, reset("game"), lambda _: say(f"[{next(said)}]"))
    assert responses[-1].reward == pytest.approx(expected) and responses[-1].metrics["solved"] == 0.0


async def test_each_answer_holds_what_is_new():
    async with served() as (stub, _):
        conversation = Conversation(stub)
        rules = (await conversation.send(reset("game"))).messages[0].content
        assert "between 1 and 20" in rules
        answers = [(await conversation.send(say(f"my guess: [{n}]"))).messages[0].content for n in (1, 2)]
    assert all(re.fullmatch(r"The target number is (higher|lower)\.", answer) for answer in answers)


async def test_a_malformed_move_is_answered():
    async with served() as (stub, _):
        conversation = Conversation(stub)
        await conversation.send(reset("game"))
        response = await conversation.send(say("\0 seven"))
        assert "invalid move" in response.messages[0].content and not response.terminated


async def test_the_same_task_is_the_same_game_whatever_other_episodes_do():
    async with served(id="Blackjack-v0") as (stub, _):

        async def episode(seed: int) -> list:
            return await play(stub, reset("game", seed=seed), lambda _: say(random.choice(["[Hit]"])))

        alone = [await episode(seed) for seed in range(6)]
        together = await asyncio.gather(*[episode(seed) for seed in range(6)], *[episode(9) for _ in range(6)])
        assert list(together[:6]) == alone and len({str(episode) for episode in alone}) > 1


async def test_episodes_leave_the_global_generator_to_others():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    game = TextGame()
    await game.reset(reset("game", seed=1).reset)
    await game.step(say("[3]").action)
    assert random.random() == expected


async def test_others_are_answered_while_boards_are_searched_for():
    # These take a while to find, and their workers to start.
    async with served(id="Sokoban-v0") as (stub, _):
        resets = [asyncio.create_task(Conversation(stub).send(reset("game", seed=seed))) for seed in range(4)]
        answered = 0
        while answered < 20 and not all(task.done() for task in resets):
            await stub.ListEnvironments(pb.ListEnvironmentsRequest())
            answered += 1
        assert answered == 20
        boards = [response.messages[0].content for response in await asyncio.gather(*resets)]
        again = await Conversation(stub).send(reset("game", seed=0))
    assert again.messages[0].content == boards[0] and len(set(boards)) == 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"id": "TicTacToe-v0"}, "by one player"),
        ({"id": "Wordle-v0"}, "cannot be played here"),
        ({"id": "Nothing-v0"}, "not found in registry"),
        ({"id": "GuessTheNumber-v0", "arguments": {"colour": 1}}, "colour"),
    ],
)
def test_what_cannot_be_played_is_refused(options, says):
    with pytest.raises(ValueError, match=says) as refused:
        TextGame(**options)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_the_games_that_work_offline_still_do():
    working = (
        "2048 Bandit Blackjack Countdown Crosswords Cryptarithm FifteenPuzzle FrozenLake GuessTheNumber LightsOut "
    )
    working += "LogicPuzzle Mastermind Minesweeper PegJump RushHour Secretary Set Slitherlink Sokoban Sudoku "
    working += "ThreeCardMonte TowerOfHanoi UltimateTexasHoldem"
    for name in working.split():
        TextGame(f"{name}-v0")
