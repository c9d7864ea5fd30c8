"""services.envs.single_turn: a function and its verifier make an environment."""

import random

import grpc
import pytest

from headrace.errors import StartupError
from headrace.v1.environment_service_pb2 import Action
from services.envs import catalog
from services.envs.environment import Task, assistant, user
from services.envs.single_turn import Question, Verdict, single_turn
from tests.envs.conversation import DEMONSTRATION, Conversation, play, reset, say, serving


@single_turn(splits={"train": 0, "test": 5}, metric_names=["length"])
def addition(task: Task, draw: random.Random, largest: int = 9) -> Question:
    """Adds two numbers."""
    a, b = draw.randint(0, largest), draw.randint(0, largest)

    def verify(answer: str) -> Verdict:
        return Verdict(float(answer.strip() == str(a + b)), {"length": len(answer)})

    return Question(f"{a} + {b}", verify, demonstration=str(a + b))


@single_turn()
async def waits(task: Task, draw: random.Random) -> Question:
    """Awaits everything."""

    async def verify(answer: str) -> bool:
        return answer == "yes"

    return Question([user("a"), user("b")], verify)


def answer_of(prompt: str) -> str:
    a, b = prompt.split(" + ")
    return str(int(a) + int(b))


async def test_right_earns_1_and_wrong_0():
    async with serving({"addition": addition}) as (stub, _):
        for seed in range(5):
            request = reset("addition", split="test", seed=seed)
            responses = await play(stub, request, lambda first: say(answer_of(first.messages[0].content)))
            assert (responses[-1].reward, responses[-1].terminated) == (1.0, True)
            assert responses[-1].metrics["length"] in (1, 2)
            assert (await play(stub, request, lambda first: say("")))[-1].reward == 0.0


async def test_the_verifier_and_the_function_may_be_async():
    environment = waits()
    assert [message.content for message in (await environment.reset(Task())).messages] == ["a", "b"]
    assert (await environment.step(Action(message=assistant("yes")))).reward == 1.0


async def test_the_same_task_asks_the_same():
    async def prompt(seed: int) -> str:
        return (await addition(largest=10**9).reset(Task(seed=seed))).messages[0].content

    assert await prompt(3) == await prompt(3) != await prompt(4)


async def test_a_demonstration_needs_an_expert():
    async with serving({"addition": addition, "waits": waits}) as (stub, _):
        first = await Conversation(stub).send(reset("addition", purpose=DEMONSTRATION))
        assert first.demonstration.content == answer_of(first.messages[0].content)
        code, _ = await Conversation(stub).refusal(reset("waits", purpose=DEMONSTRATION))
        assert code == grpc.StatusCode.FAILED_PRECONDITION


def test_it_is_found_and_its_options_are_checked():
    made = catalog.find("tests.envs.test_single_turn:addition", {"largest": 3})()
    assert (type(made).__name__, type(made).__doc__) == ("addition", "Adds two numbers.")
    with pytest.raises(StartupError, match="unexpected keyword argument 'size'"):
        catalog.find("tests.envs.test_single_turn:addition", {"size": 3})
