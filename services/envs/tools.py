"""Tools as typed methods: their signatures are the JSON schemas, their return values the answers.

    class Shop(ToolEnvironment):
        '''Buy the cheapest thing in stock.'''

        async def start(self, task: Task, draw: random.Random) -> str:
            self._prices = {name: draw.randint(1, 9) for name in ("apple", "pear")}
            return "Name the cheaper one: apple or pear."

        @tool
        def price(self, thing: Literal["apple", "pear"]) -> int:
            '''The price of a thing.

            Args:
                thing: what to look up
            '''
            return self._prices[thing]

        async def answer(self, message: Message) -> TimeStep:
            cheapest = min(self._prices, key=self._prices.__getitem__)
            return TimeStep(reward=float(message.content.strip() == cheapest), terminated=True)

The calls of one turn run at the same time and are answered in their order. What the policy got wrong (an unknown name,
arguments that do not fit, a ToolError) becomes an answer that starts with "error:"; any other exception costs the
episode, as everywhere. A tool that must not be run twice at once takes a lock of its own; one that blocks awaits
`self.blocking(…)`.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import inspect
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

from services.envs.environment import (
    Action,
    Environment,
    Message,
    Task,
    TimeStep,
    Tool,
    ToolCall,
    task_random,
    tool_answer,
    user,
)
from services.envs.schema import ArgumentError, Parameters

CALL_METRICS = ("calls", "failed_calls")

_MARK = "_headrace_tool"


class ToolError(Exception):
    """What a tool raises when the policy asked for something wrong; the policy reads the message."""


@dataclasses.dataclass(frozen=True)
class BoundTool:
    """A tool that can be called: what the policy is told of it, and what runs."""

    record: Tool
    run: Callable[[str], Awaitable[Any]]
    """Takes the arguments as JSON and returns the answer, of any type that JSON can carry; raises ToolError or
    ArgumentError for a wrong call."""


def tool[Method: Callable[..., Any]](method: Method) -> Method:
    """Marks a method of a ToolEnvironment, sync or async, as a tool of that name; its docstring is the description."""
    setattr(method, _MARK, True)
    return method


class ToolEnvironment(Environment):
    """An environment whose policy calls the methods marked with `tool`, and answers with a message without calls."""

    metric_names: Sequence[str] = CALL_METRICS
    """A subclass names its own; `calls` and `failed_calls` are added."""
    max_turns: int | None = None
    """Actions until `out_of_turns` ends the episode; None: the gateway's limit alone."""

    _parameters: ClassVar[Mapping[str, Parameters]] = {}
    _turns = 0
    _calls = 0
    _failed_calls = 0
    _finished: float | None = None

    def __init_subclass__(cls, **kwargs: Any):
        """Reads the tools. Raises TypeError for a signature that has no JSON schema."""
        super().__init_subclass__(**kwargs)
        # In the order of their declaration, those of base classes first.
        names = dict.fromkeys(name for kind in reversed(cls.__mro__) for name in vars(kind))
        marked = {name: getattr(cls, name) for name in names if hasattr(getattr(cls, name, None), _MARK)}
        cls._parameters = {name: Parameters(method, skip=1) for name, method in marked.items()}
        if isinstance(cls.metric_names, Sequence):
            cls.metric_names = (*CALL_METRICS, *(name for name in cls.metric_names if name not in CALL_METRICS))

    @abc.abstractmethod
    async def start(self, task: Task, draw: random.Random) -> str | Sequence[Message]:
        """Starts the episode: the prompt. `draw` is seeded by the task: the same task draws the same."""

    @abc.abstractmethod
    async def answer(self, message: Message) -> TimeStep:
        """What follows a message without tool calls: mostly the end of the episode, with its reward."""

    async def out_of_turns(self) -> TimeStep:
        """The end after `max_turns` actions, of which the last called tools: reward 0 unless overridden."""
        return TimeStep(reward=0.0, terminated=True)

    def finish(self, reward: float) -> None:
        """For a tool: the episode ends with this turn and this reward."""
        self._finished = reward

    def tools(self) -> Sequence[BoundTool]:
        """The tools of this episode, asked for after `start` and on each turn; override it to add others."""
        return [self._bound(name, parameters) for name, parameters in self._parameters.items()]

    async def reset(self, task: Task) -> TimeStep:
        prompt = await self.start(task, task_random(task))
        messages = [user(prompt)] if isinstance(prompt, str) else prompt
        return TimeStep(messages, tools=[bound.record for bound in self.tools()])

    async def step(self, action: Action) -> TimeStep:
        self._turns += 1
        if not action.message.tool_calls and not action.malformed_tool_calls:
            return self._counted(await self.answer(action.message))
        answers = await answer_calls(action, self.tools())
        self._calls += len(answers)
        self._failed_calls += sum(answer.content.startswith("error:") for answer in answers)
        if self._finished is not None:
            return self._counted(TimeStep(answers, reward=self._finished, terminated=True))
        if self._turns == self.max_turns:
            last = await self.out_of_turns()
            return self._counted(dataclasses.replace(last, messages=[*answers, *last.messages]))
        return self._counted(TimeStep(answers))

    def _bound(self, name: str, parameters: Parameters) -> BoundTool:
        method = getattr(self, name)
        description = (inspect.getdoc(method) or "").partition("\nArgs:\n")[0].strip()
        record = Tool(name=name, description=description, parameters_json=json.dumps(parameters.schema))

        async def run(arguments_json: str) -> Any:
            result = method(**parameters.bind(arguments_json))
            return await result if inspect.isawaitable(result) else result

        return BoundTool(record, run)

    def _counted(self, step: TimeStep) -> TimeStep:
        counts = {"calls": self._calls, "failed_calls": self._failed_calls}
        return dataclasses.replace(step, metrics={**counts, **step.metrics})


async def answer_calls(action: Action, tools: Sequence[BoundTool]) -> list[Message]:
    """Runs an action's calls at once: one tool message each, in their order, then one for each malformed call.

    Raises what a tool raises, unless it is the policy's fault; the other calls are cancelled then.
    """
    by_name = {bound.record.name: bound for bound in tools}
    running = [asyncio.ensure_future(_answered(call, by_name)) for call in action.message.tool_calls]
    try:
        answers = list(await asyncio.gather(*running))
    finally:
        for call in running:
            call.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return answers + [Message(role="tool", content=f"error: {line}") for line in action.malformed_tool_calls]


async def _answered(call: ToolCall, tools: Mapping[str, BoundTool]) -> Message:
    if call.name not in tools:
        return tool_answer(call, f"error: no tool {call.name!r}, but {', '.join(tools) or 'none'}")
    try:
        return tool_answer(call, _readable(_text(await tools[call.name].run(call.arguments_json))))
    except (ToolError, ArgumentError) as error:
        return tool_answer(call, _readable(f"error: {error}"))


def _readable(text: str) -> str:
    """The text without lone surrogates, which a message cannot hold."""
    return text.encode("utf-8", "replace").decode()


def _text(result: Any) -> str:
    """A tool's result as the policy reads it: text as it is, nothing as "done", the rest as JSON."""
    if isinstance(result, str):
        return result
    if result is None:
        return "done"
    return json.dumps(result, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"a tool returned {type(value).__name__}, which JSON cannot carry")
