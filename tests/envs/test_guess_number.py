"""services.envs.guess_number: the rules, and what each kind of policy can reach."""

import random

import pytest

from headrace.v1 import environment_service_pb2 as pb
from headrace.v1 import trajectory_pb2
from services.envs.environment import TimeStep, assistant
from services.envs.guess_number import GuessNumber

pytestmark = pytest.mark.asyncio


async def play(environment: GuessNumber, guesses: list[str], *, index: int, seed: int = 0) -> list[TimeStep]:
    steps = [await environment.reset(trajectory_pb2.Task(index=index, seed=seed))]
    for guess in guesses:
        steps.append(await environment.step(pb.Action(message=assistant(guess))))
        if steps[-1].ended:
            break
    return steps


def texts(steps: list[TimeStep]) -> list[str]:
    return [message.content for step in steps for message in step.messages]


async def test_the_feedback_leads_to_the_secret():
    steps = await play(GuessNumber(), ["4", "it is 6.", "5 or 7", "7"], index=6)
    assert texts(steps) == ["guess a number from 1 to 8", "higher", "higher", "higher", "found"]
    assert [step.reward for step in steps] == [None, None, None, None, 1.0] and steps[-1].terminated
    assert texts(await play(GuessNumber(), ["4", "2", "1"], index=0))[1:] == ["lower", "lower", "found"]


async def test_turns_used_up_end_with_reward_0():
    steps = await play(GuessNumber(), ["1", "2", "3", "4"], index=7)
    assert [step.reward for step in steps] == [None, None, None, None, 0.0]
    assert steps[-1].terminated and not steps[-1].truncated
    assert steps[-1].metrics == {"guesses": 4, "invalid_guesses": 0}


@pytest.mark.parametrize("reply", ["", "<unk>", "guess", "0", "9", "1" * 5000, "\u0663", "\0"])
async def test_what_is_no_guess_costs_a_turn(reply):
    steps = await play(GuessNumber(), [reply, "3"], index=2)
    assert texts(steps)[1:] == ["invalid", "found"]
    assert steps[-1].metrics == {"guesses": 2, "invalid_guesses": 1}


async def test_the_expert_finds_every_secret_in_time():
    for index in range(8):
        environment = GuessNumber()
        steps = await play(environment, [], index=index)
        while not steps[-1].ended:
            steps.append(await environment.step(pb.Action(message=await environment.demonstrate())))
        assert steps[-1].reward == 1.0


async def test_blind_feedback_tells_nothing_and_depends_on_the_seed_alone():
    answers = {
        tuple(texts(await play(GuessNumber(feedback="blind"), ["8"] * 4, index=index, seed=5))[1:])
        for index in range(7)
    }
    assert len(answers) == 1
    heard = [
        texts(await play(GuessNumber(feedback="blind", turns=2), ["1"] * 2, index=7, seed=seed))[1:]
        for seed in range(500)
    ]
    assert 420 < sum(answer == "higher" for pair in heard for answer in pair) < 580
    assert await GuessNumber(feedback="blind").demonstrate() is None


async def test_halving_the_range_beats_the_ceiling_only_with_feedback():
    draw = random.Random(1)

    async def mean_reward(feedback: str) -> float:
        rewards = []
        for seed in range(2_000):
            environment = GuessNumber(feedback=feedback)
            step = (await play(environment, [], index=draw.randrange(8), seed=seed))[-1]
            left = list(range(1, 9))
            while not step.ended:
                guess = left[(len(left) - 1) // 2]
                step = await environment.step(pb.Action(message=assistant(str(guess))))
                higher = step.messages[0].content == "higher"
                left = [n for n in left if (n > guess if higher else n < guess)] or [guess]
            rewards.append(step.reward)
        return sum(rewards) / len(rewards)

    assert await mean_reward("direction") == 1.0
    assert await mean_reward("blind") < 0.5


async def test_options_that_make_no_game_are_refused():
    for options in ({"numbers": 1}, {"turns": 0}, {"feedback": "loud"}):
        with pytest.raises(ValueError, match="must be"):
            GuessNumber(**options)
