"""services.envs.calculator: one operation a call, nothing evaluated that is not one, reward for the right answer."""

import json
import re

import pytest

from headrace.v1 import environment_service_pb2 as pb
from headrace.v1 import trajectory_pb2
from services.envs.calculator import Calculator
from services.envs.environment import TimeStep, ToolCall, assistant

pytestmark = pytest.mark.asyncio


def call(expression: object, name: str = "calculate", **more) -> ToolCall:
    return ToolCall(id="call_0", name=name, arguments_json=json.dumps({"expression": expression, **more}))


async def started(seed: int = 0, split: str = "train", **options) -> tuple[Calculator, TimeStep]:
    environment = Calculator(**options)
    return environment, await environment.reset(trajectory_pb2.Task(seed=seed, split=split))


async def step(environment: Calculator, content: str, *calls: ToolCall, malformed=()) -> TimeStep:
    return await environment.step(pb.Action(message=assistant(content, *calls), malformed_tool_calls=malformed))


async def test_the_expert_is_right_in_three_turns():
    for seed in range(200):
        environment, last = await started(seed)
        question = last.messages[0].content
        assert re.fullmatch(r"\([0-9]{1,2}[-+*][0-9]{1,2}\)[-+*][0-9]{1,2}", question)
        assert [tool.name for tool in last.tools] == ["calculate"]
        turns = 0
        while not last.ended:
            last = await environment.step(pb.Action(message=await environment.demonstrate()))
            turns += 1
        assert (turns, last.reward, last.terminated) == (3, 1.0, True)
        assert last.metrics == {"calls": 2, "failed_calls": 0}


async def test_only_the_right_answer_earns():
    environment, first = await started()
    value = eval(first.messages[0].content)
    for text, reward in [
        (str(value), 1.0),
        (f"It is {value}.", 1.0),
        (str(value + 1), 0.0),
        ("", 0.0),
        ("9" * 5000, 0.0),
    ]:
        environment, _ = await started()
        last = await step(environment, text)
        assert (last.reward, last.terminated) == (reward, True)


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("53+6", "59"),
        ("59-79", "-20"),
        ("-20*-7", "140"),
        (" 1 + 2 ", "3"),
        ("999999999999999999*999999999999999999", str(999999999999999999**2)),
        ("(53+6)-79", "error"),
        ("1+2+3", "error"),
        ("2**9", "error"),
        ("1/0", "error"),
        ("9" * 5000 + "*9", "error"),
        ("__import__('os').system('touch canary')", "error"),
        ("", "error"),
        (7, "error"),
        (None, "error"),
        (["1+2"], "error"),
    ],
)
async def test_the_tool_does_one_operation(expression, answer):
    environment, _ = await started()
    result = await step(environment, "thinking", call(expression))
    assert [(m.role, m.content, m.tool_call_id) for m in result.messages] == [("tool", answer, "call_0")]
    assert not result.ended and result.reward is None
    assert result.metrics["failed_calls"] == (answer == "error")


async def test_calls_that_are_none_are_answered():
    environment, _ = await started()
    result = await step(
        environment, "", call("1+2", "compute"), call("1+2", base=2), call("3+4"), malformed=["not JSON"]
    )
    assert [message.content for message in result.messages] == ["error", "error", "7", "error"]
    assert [message.tool_call_id for message in result.messages] == ["call_0"] * 3 + [""]
    assert result.metrics == {"calls": 4, "failed_calls": 3} and not result.ended


@pytest.mark.parametrize("text", ["", "[]", "{", '{"expression": "\\ud800"}', '{"expression": NaN}'])
async def test_arguments_that_are_none_are_answered(text):
    environment, _ = await started()
    result = await step(environment, "", ToolCall(id="call_0", name="calculate", arguments_json=text))
    assert [message.content for message in result.messages] == ["error"] and not result.ended


async def test_turns_used_up_end_with_reward_0():
    environment, _ = await started(turns=2)
    assert not (await step(environment, "", call("1+1"))).ended
    last = await step(environment, "", call("1+1"))
    assert (last.terminated, last.reward) == (True, 0.0)


async def test_tasks_are_drawn_from_seed_and_split():
    async def questions(split: str) -> list[str]:
        return [(await started(seed, split))[1].messages[0].content for seed in range(300)]

    train, test = await questions("train"), await questions("test")
    assert train == await questions("train")
    assert len(set(train)) > 280 and not set(train) & set(test)


async def test_options_that_make_no_task_are_refused():
    for options in ({"digits": 0}, {"digits": 7}, {"turns": 0}):
        with pytest.raises(ValueError, match="digits must be"):
            Calculator(**options)
