"""The README's environment is real code."""

import re

import pytest

from headrace.v1 import trajectory_pb2
from headrace.v1.environment_service_pb2 import Action
from services.envs.environment import Environment
from tests.processes import ROOT


@pytest.fixture
def environment() -> Environment:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    assert len(block[1].splitlines()) <= 25
    names: dict[str, type] = {}
    exec(block[1], names)
    return names["Reverse"]()


async def step(environment: Environment, text: str):
    return await environment.step(Action(message=trajectory_pb2.Message(role="assistant", content=text)))


async def test_the_readmes_environment_rewards_what_it_says(environment):
    first = await environment.reset(trajectory_pb2.Task(seed=1))
    word = first.messages[0].content.split()[1]
    assert not (await step(environment, word)).ended
    last = await step(environment, word[::-1])
    assert (last.reward, last.terminated) == (1.0, True)


async def test_it_ends_after_three_attempts(environment):
    await environment.reset(trajectory_pb2.Task(seed=1))
    steps = [await step(environment, "?") for _ in range(3)]
    assert [answer.reward for answer in steps] == [None, None, 0.0]
    assert steps[-1].terminated
