"""The base class of environments, and the records that it exchanges.

A server makes one object for each episode and calls reset once, step until a time step ends the episode, and close once
(also when the episode is cut off, or never reset). No two calls overlap. They run on the server's event loop: await
what waits, and give what computes long to `asyncio.to_thread`. An exception costs the episode and is reported; a wrong
action is no exception, but something to answer. For example, a whole environment:

    class Sum(Environment):
        '''Adds two numbers.'''

        splits = {"train": 0}                      # drawn from the task's seed without end

        def __init__(self, largest: int = 9):      # `options` of the run's config; several objects live at once
            self._largest = largest

        async def reset(self, task: Task) -> TimeStep:
            draw = random.Random(task.seed)        # the same task and seed give the same episode
            self._a, self._b = draw.randint(0, self._largest), draw.randint(0, self._largest)
            return TimeStep([user(f"What is {self._a} + {self._b}?")])

        async def step(self, action: Action) -> TimeStep:
            right = action.message.content.strip() == str(self._a + self._b)
            return TimeStep(reward=float(right), terminated=True)

Serve it with `python -m services.envs --class my_package.sum:Sum`, or name it as `class` in a run's config. This module
imports the records and nothing else, so an environment's own dependencies are all that it needs.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from headrace.v1.environment_service_pb2 import Action, Tool
from headrace.v1.trajectory_pb2 import Message, Task, ToolCall


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


def user(content: str) -> Message:
    """A user message."""
    return Message(role="user", content=content)


def assistant(content: str, *tool_calls: ToolCall) -> Message:
    """An assistant message, as `demonstrate` gives it."""
    return Message(role="assistant", content=content, tool_calls=tool_calls)


def tool_answer(call: ToolCall, content: str) -> Message:
    """The message that answers a tool call."""
    return Message(role="tool", content=content, tool_call_id=call.id)
