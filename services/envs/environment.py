"""The base class of environments, and the records that it exchanges.

A server makes one object for each episode and calls reset once, step until a time step ends the episode, and close once
(also when the episode is cut off, or never reset). No two calls overlap. They run on the server's event loop: await
what waits, and give what computes long or may hang to `self.blocking`. An exception costs the episode and is reported;
a wrong action is no exception, but something to answer. For example, a whole environment:

    class Sum(Environment):
        '''Adds two numbers.'''

        splits = {"train": 0}                      # drawn from the task's seed without end

        def __init__(self, largest: int = 9):      # `options` of the run's config; several objects live at once
            self._largest = largest

        async def reset(self, task: Task) -> TimeStep:
            draw = task_random(task)               # the same task and seed give the same episode
            self._a, self._b = draw.randint(0, self._largest), draw.randint(0, self._largest)
            return TimeStep([user(f"What is {self._a} + {self._b}?")])

        async def step(self, action: Action) -> TimeStep:
            right = action.message.content.strip() == str(self._a + self._b)
            return TimeStep(reward=float(right), terminated=True)

Serve it with `python -m services.envs my_package.sum:Sum`, or name it as `class` in a run's config. This module imports
the records and nothing else, so an environment's own dependencies are all that it needs. `services.envs.single_turn`
makes one of a function, and `services.envs.tools` gives the policy typed tools.
"""

from __future__ import annotations

import abc
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from headrace.v1.environment_service_pb2 import Action, Tool
from headrace.v1.trajectory_pb2 import Message, Task, ToolCall


class Executor(Protocol):
    """What runs blocking calls; `services.envs.blocking.Workers` is one."""

    async def call[T](self, function: Callable[..., T], *arguments: Any, timeout_s: float | None = None) -> T:
        """The result of the call, or what it raised. Raises TimeoutError, after which nothing of it runs on."""
        ...


@dataclass(frozen=True)
class TimeStep:
    """What the environment answers to a reset or an action.

    Over an episode at least one reward must be given, or nobody has judged it. `terminated` is an end that belongs to
    the task, a turn limit among its rules included; `truncated` is a cut from outside it.
    """

    messages: Sequence[Message] = ()
    """User and tool messages for the policy; after a reset, the prompt. At least one while the episode is open."""
    tools: Sequence[Tool] = ()
    """Tools of the episode; after a reset only."""
    reward: float | None = None
    """Reward of the action, finite. None means no signal, which differs from 0."""
    terminated: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Finite numbers worth reporting, by names of `metric_names`; of each the episode's last counts."""

    @property
    def ended(self) -> bool:
        """Whether the policy acts no more."""
        return self.terminated or self.truncated


class Environment(abc.ABC):
    """One episode. The first line of a subclass's docstring describes it to people."""

    splits: Mapping[str, int] = MappingProxyType({"train": 0})
    """Number of tasks by split; 0: drawn from the task's seed without end. May depend on the options."""
    metric_names: Sequence[str] = ()
    """Every name that `TimeStep.metrics` may hold."""
    step_timeout_s: float | None = None
    """What a reset or a step may take before it is cancelled and the episode fails; None: as long as its client waits.
    The server's --step-timeout-s replaces it."""
    blocking_workers: int = 2
    """Processes that run the `blocking` calls of all episodes of a server; further calls wait their turn."""

    shared: Any = None
    """In every episode what `setup` yielded; without a server None."""
    executor: Executor | None = None
    """Set by the server for `blocking`; a test sets one of its own."""

    @contextlib.asynccontextmanager
    async def setup(self) -> AsyncIterator[Any]:
        """What all episodes of a server share: prepares it once, before the first episode, and closes it at the end.

        Called on an object that is never reset, so `self` holds the options and nothing else of what it sets here
        reaches an episode. Mostly it yields a Pool of resources that are slow to start:

            @contextlib.asynccontextmanager
            async def setup(self):
                async with Pool(start_browser, size=4, check=is_alive, close=stop_browser) as browsers:
                    yield browsers
        """
        yield None

    @abc.abstractmethod
    async def reset(self, task: Task) -> TimeStep:
        """Starts the episode: the prompt, and the tools if there are any."""

    @abc.abstractmethod
    async def step(self, action: Action) -> TimeStep:
        """Answers an action, malformed tool calls included."""

    async def close(self) -> None:
        """Lets go of what the episode holds."""
        return

    async def demonstrate(self) -> Message | None:
        """What an expert would do now, asked after an open time step of a demonstration; None: there is no expert."""
        return None

    async def blocking[T](self, function: Callable[..., T], *arguments: Any, timeout_s: float | None = None) -> T:
        """Runs what blocks in a worker process: no other episode waits for it, and it is killed when it is too late.

        The function must be importable and its arguments and result picklable: state stays here, in the episode. It is
        killed, with every process that it started, at `timeout_s` (seconds from its start; then TimeoutError) and
        when this call is cancelled, as it is when the episode's client goes or its step's deadline passes. For code
        that is sure to return and holds the interpreter's lock briefly, `asyncio.to_thread` costs less.
        """
        if self.executor is None:
            raise RuntimeError("no executor: a server sets it; in a test, set services.envs.blocking.Workers yourself")
        return await self.executor.call(function, *arguments, timeout_s=timeout_s)


def task_random(task: Task) -> random.Random:
    """Everything that an episode draws should come from here: the same task and seed draw the same."""
    return random.Random(f"{task.split}/{task.index}/{task.seed}")


def user(content: str) -> Message:
    """A user message."""
    return Message(role="user", content=content)


def assistant(content: str, *tool_calls: ToolCall) -> Message:
    """An assistant message, as `demonstrate` gives it."""
    return Message(role="assistant", content=content, tool_calls=tool_calls)


def tool_answer(call: ToolCall, content: str) -> Message:
    """The message that answers a tool call."""
    return Message(role="tool", content=content, tool_call_id=call.id)
