"""Python tool: small problems that a program in a sandbox answers, its variables kept from one call to the next."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from services.envs.environment import Action, Message, Task, TimeStep, ToolCall, assistant, user
from services.envs.sandbox import choice
from services.envs.sandbox.sandbox import Code, Ending, Outcome, Sandbox
from services.envs.tools import ToolEnvironment, ToolError, tool

LETTERS = "abcd"
# One question in so many, by its text, is kept for the split "test" and never trained on.
TEST_SHARE = 10
NUMBER = re.compile(r"[-+]?\d{1,40}(?:\.\d{1,40})?(?:[eE][-+]?\d{1,2})?")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question, its answer, and an expression that an expert would print."""

    question: str
    answer: int | str
    expression: str


class PythonTool(ToolEnvironment):
    """Answer questions about numbers, text and lists with the help of a Python interpreter.

    A message without calls is the final answer. Where a number is asked for, the last number in it counts, compared as
    a number (42.0 answers 42); where text is, its last word without quotes. Reward 1 if that is right, else 0.
    """

    splits = {"train": 0, "test": 0}  # noqa: RUF012

    def __init__(
        self,
        *,
        kinds: Sequence[str] = ("arithmetic", "text", "list"),
        digits: int = 2,
        length: int = 6,
        turns: int = 4,
        deadline_s: float = 5.0,
        terse: bool = False,
        instructions: str = "",
        sandbox: Mapping[str, Any] | None = None,
    ):
        """Verifies the sandbox's isolation when the first one is made.

        Args:
            kinds: kinds of problem, of KINDS.
            digits: of the largest number.
            length: letters of the longest text, numbers of the longest list.
            turns: actions until the episode ends.
            deadline_s: what one call may take.
            terse: answers what failed with the one word "error", for a model with a small vocabulary.
            instructions: a system message.
            sandbox: see services.envs.sandbox.choice.Choice.

        Raises ValueError or TypeError for options that make no task, StartupError.
        """
        unknown = set(kinds) - set(KINDS)
        if unknown or not kinds:
            raise ValueError(f"kinds must be some of {sorted(KINDS)}, not {list(kinds)}")
        if not 1 <= digits <= 6 or length < 2 or turns < 1 or deadline_s <= 0:
            raise ValueError("digits must be 1 to 6, length 2 or more, turns 1 or more, deadline_s above 0")
        self.max_turns = turns
        self._kinds, self._digits, self._length = tuple(kinds), digits, length
        self._deadline_s, self._terse, self._instructions = deadline_s, terse, instructions
        self._sandboxes = choice.verified(choice.Choice.parse(sandbox or {}))
        self._opened = contextlib.AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._running = asyncio.Lock()
        self._printed = ""

    async def start(self, task: Task, draw: random.Random) -> Sequence[Message]:
        while True:
            self._problem = KINDS[draw.choice(self._kinds)](draw, self._digits, self._length)
            if (zlib.crc32(self._problem.question.encode()) % TEST_SHARE == 0) == (task.split == "test"):
                break
        system = [Message(role="system", content=self._instructions)] if self._instructions else []
        return [*system, user(self._problem.question)]

    @tool
    async def python(self, code: str) -> str:
        """Runs Python code and returns what it prints. Variables, functions and imports stay for the next call.

        Args:
            code: the source; only what it prints is returned
        """
        async with self._running:
            if self._sandbox is None:
                self._sandbox = await self._opened.enter_async_context(self._sandboxes.open())
            outcome = await self._sandbox.run(Code(code), deadline_s=self._deadline_s)
        self._printed = outcome.stdout.strip()
        if not outcome.succeeded:
            raise ToolError(failure(outcome, self._deadline_s))
        return outcome.stdout.rstrip("\n")

    async def step(self, action: Action) -> TimeStep:
        step = await super().step(action)
        if not self._terse:
            return step
        messages = [_shortened(message) for message in step.messages]
        return dataclasses.replace(step, messages=messages)

    async def answer(self, message: Message) -> TimeStep:
        return TimeStep(reward=float(is_right(message.content, self._problem.answer)), terminated=True)

    async def demonstrate(self) -> Message:
        """Prints an expression that gives the answer, then repeats what was printed."""
        if self._printed:
            return assistant(self._printed)
        arguments = json.dumps({"code": f"print({self._problem.expression})"})
        return assistant("", ToolCall(id="call_0", name="python", arguments_json=arguments))

    async def close(self) -> None:
        await self._opened.aclose()


def is_right(text: str, answer: int | str) -> bool:
    """Whether a final message gives the answer. Nothing in it is evaluated."""
    if isinstance(answer, str):
        words = text.split()
        return bool(words) and words[-1].strip("\"'`.,!*") == answer
    numbers = NUMBER.findall(text)
    return bool(numbers) and Fraction(numbers[-1]) == answer


def failure(outcome: Outcome, deadline_s: float) -> str:
    """What went wrong, as the policy reads it: what was printed, then the error."""
    reason = {
        Ending.EXITED: outcome.stderr.strip() or f"the code exited with status {outcome.exit_status}",
        Ending.DEADLINE: f"the code was stopped after {deadline_s:g} s",
        Ending.OUTPUT: "the code was stopped: it printed too much",
        Ending.SCRATCH: "the code was stopped: it wrote too many files",
        Ending.LOST: "the sandbox was stopped for what the code took, and is gone",
    }[outcome.ending]
    again = outcome.state_lost and outcome.ending is not Ending.LOST
    lost = "\n(the interpreter was started again: variables are gone)" if again else ""
    printed = outcome.stdout[:2000]
    return f"{printed}{reason}{lost}"


def _shortened(message: Message) -> Message:
    if message.role != "tool" or not message.content.startswith("error:"):
        return message
    return Message(role="tool", content="error", tool_call_id=message.tool_call_id)


def _arithmetic(draw: random.Random, digits: int, length: int) -> Problem:
    a, b, c = (draw.randrange(10 ** draw.randint(1, digits)) for _ in range(3))
    first, second = draw.choices("+-*", k=2)
    inner = {"+": a + b, "-": a - b, "*": a * b}[first]
    value = {"+": inner + c, "-": inner - c, "*": inner * c}[second]
    question = f"({a}{first}{b}){second}{c}"
    return Problem(question, value, question)


def _text(draw: random.Random, digits: int, length: int) -> Problem:
    text = "".join(draw.choices(LETTERS, k=draw.randint(2, length)))
    letter = draw.choice(LETTERS)
    return draw.choice(
        (
            Problem(f"length of {text}", len(text), f"len('{text}')"),
            Problem(f"count {letter} in {text}", text.count(letter), f"'{text}'.count('{letter}')"),
            Problem(f"reverse {text}", text[::-1], f"'{text}'[::-1]"),
        )
    )


def _list(draw: random.Random, digits: int, length: int) -> Problem:
    numbers = [draw.randrange(10 ** draw.randint(1, digits)) for _ in range(draw.randint(2, max(2, length // 2)))]
    shown = json.dumps(numbers, separators=(",", ":"))
    name, function = draw.choice((("sum", sum), ("max", max), ("min", min)))
    return Problem(f"{name} of {shown}", function(numbers), f"{name}({shown})")


KINDS: dict[str, Callable[[random.Random, int, int], Problem]] = {
    "arithmetic": _arithmetic,
    "text": _text,
    "list": _list,
}
