"""Calculator: arithmetic questions that a tool answers one operation at a time."""

from __future__ import annotations

import json
import operator
import random
import re
import zlib
from collections.abc import Callable

from services.envs.environment import (
    Action,
    Environment,
    Message,
    Task,
    TimeStep,
    Tool,
    ToolCall,
    assistant,
    tool_answer,
    user,
)
from services.envs.schema import ArgumentError, json_object

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}

CALCULATE = Tool(
    name="calculate",
    description="Evaluates one operation on two whole numbers, for example 12*-7.",
    parameters_json=json.dumps(
        {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "a+b, a-b or a*b"}},
            "required": ["expression"],
        }
    ),
)

# One word, so that a model made from nothing can have it in its vocabulary.
ERROR = "error"

# One question in so many, by its text, is kept for the split "test" and never trained on.
TEST_SHARE = 10


class Calculator(Environment):
    """Answer questions such as (53+6)-79 with a tool that does one operation at a time.

    A message with tool calls is answered with their results, "error" for each that is malformed, names another tool or
    asks for more than one operation. A message without any is the final answer: the last whole number in it. Reward 1
    if that is right, else 0; 0 also when the turns are used up, which are a rule of the task.
    """

    splits = {"train": 0, "test": 0}  # noqa: RUF012
    metric_names = ("calls", "failed_calls")

    def __init__(self, digits: int = 2, turns: int = 4):
        """Operands have up to `digits` digits. Raises ValueError for options that make no task."""
        if not 1 <= digits <= 6 or turns < 1:
            raise ValueError("digits must be 1 to 6, turns 1 or more")
        self._digits = digits
        self._turns = turns
        self._taken = 0
        self._calls = 0
        self._failed = 0

    async def reset(self, task: Task) -> TimeStep:
        question, self._plan = _question(random.Random(f"{task.index}/{task.seed}"), self._digits, task.split == "test")
        self._value = _evaluate(f"{_evaluate(self._plan[0])}{self._plan[1]}")
        return TimeStep([user(question)], tools=[CALCULATE])

    async def step(self, action: Action) -> TimeStep:
        self._taken += 1
        answers = [tool_answer(call, self._call(call)) for call in action.message.tool_calls]
        answers += [Message(role="tool", content=ERROR) for _ in action.malformed_tool_calls]
        self._calls += len(answers)
        self._failed += sum(answer.content == ERROR for answer in answers)
        metrics = {"calls": self._calls, "failed_calls": self._failed}
        if not answers:
            right = _last_number(action.message.content) == self._value
            return TimeStep(reward=float(right), terminated=True, metrics=metrics)
        if self._taken == self._turns:
            return TimeStep(answers, reward=0.0, terminated=True, metrics=metrics)
        return TimeStep(answers, metrics=metrics)

    async def demonstrate(self) -> Message:
        """Calls the tool for the inner operation, then for the outer one, then answers."""
        if self._taken == len(self._plan):
            return assistant(str(self._value))
        before = str(_evaluate(self._plan[0])) if self._taken else ""
        arguments = json.dumps({"expression": before + self._plan[self._taken]})
        return assistant("", ToolCall(id="call_0", name=CALCULATE.name, arguments_json=arguments))

    def _call(self, call: ToolCall) -> str:
        try:
            arguments = json_object(call.arguments_json)
        except ArgumentError:
            return ERROR
        expression = arguments.get("expression")
        if call.name != CALCULATE.name or len(arguments) != 1 or not isinstance(expression, str):
            return ERROR
        value = _evaluate(expression)
        return ERROR if value is None else str(value)


def _question(draw: random.Random, digits: int, test: bool) -> tuple[str, tuple[str, str]]:
    """A question of the split, as text and as its two operations: "a+b", and "-c" on their result."""
    while True:
        a, b, c = (draw.randrange(10 ** draw.randint(1, digits)) for _ in range(3))
        first, second = draw.choices(tuple(OPERATIONS), k=2)
        question = f"({a}{first}{b}){second}{c}"
        if (zlib.crc32(question.encode()) % TEST_SHARE == 0) == test:
            return question, (f"{a}{first}{b}", f"{second}{c}")


def _evaluate(expression: str) -> int | None:
    """The value of one operation on two whole numbers of at most 18 digits; None when it is anything else."""
    found = re.fullmatch(r"\s*(-?[0-9]{1,18})\s*([-+*])\s*(-?[0-9]{1,18})\s*", expression)
    return OPERATIONS[found[2]](int(found[1]), int(found[3])) if found else None


def _last_number(text: str) -> int | None:
    found = re.findall(r"-?[0-9]+", text)
    return int(found[-1][:40]) if found else None
