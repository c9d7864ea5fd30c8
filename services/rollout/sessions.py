"""Agents from outside: who drives an episode is a program that opens a session, and asks for completions in it.

To the episode such a program is one more environment: what it says next is the observation, what the policy answers is
the action, and the reward that closes the session ends the task. So its tokens are rendered, sampled and recorded by
the same loop, once, in the same append-only way. A conversation that the agent edits can therefore not be continued: it
is refused, and the episode stays as it was.

    ticket -> place() waits -> POST /sessions claims it -> reset: first request -> step: answer, next request -> reward

A session whose agent says nothing for reset_timeout_s (before its first request) or step_timeout_s (after it) has been
abandoned. That is a failure of the session and no reward: the episode is offered to another agent, episode_attempts
times in all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from headrace import config
from headrace.trajectory import token_ids
from headrace.v1 import environment_service_pb2 as environment_pb
from headrace.v1 import trajectory_pb2 as pb
from services.rollout import tools
from services.rollout.environment import EnvironmentFailure, EnvironmentRefusal
from services.rollout.record import status_name
from services.rollout.renderer import Renderer

_REMEMBERED = 4096  # ended sessions whose agents may still ask


class Conflict(Exception):
    """A request that does not continue what was recorded, in one line. The session stays open."""


class Ended(Exception):
    """The session is over, in one line."""


@dataclass(eq=False)
class _Request:
    """The agent waits for a completion."""

    conversation: list[pb.Message]
    new: list[pb.Message]
    tools: list[environment_pb.Tool]
    answer: asyncio.Future[Completion]


@dataclass(frozen=True)
class _Reward:
    """The agent is done."""

    reward: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Completion:
    """What the policy answered."""

    message: pb.Message
    finish_reason: str  # "stop", "tool_calls" or "length"
    prompt_tokens: int
    completion_tokens: int


class AgentSession:
    """One agent's episode: a Stage to the episode, a conversation to the agent."""

    def __init__(self, task: pb.Task, settings: config.Environment, renderer: Renderer, thinking: str):
        self.session_id = secrets.token_urlsafe(24)
        self.task = task
        self.trajectory = pb.Trajectory()  # that of the episode, once it has begun
        self.ended: asyncio.Future[pb.Trajectory] = asyncio.get_running_loop().create_future()
        self._settings, self._renderer, self._thinking = settings, renderer, thinking
        self._inbox: asyncio.Queue[_Request | _Reward | str] = asyncio.Queue()
        self._waiting: _Request | None = None
        self._recorded: list[pb.Message] = []  # the whole conversation, our answers included
        self._tools: list[environment_pb.Tool] = []
        self._last: Completion | None = None
        self._turn = asyncio.Lock()
        self._closing = False
        self._why = ""

    # The agent's side.

    async def complete(self, messages: list[pb.Message], offered: list[environment_pb.Tool]) -> Completion:
        """The policy's answer to a conversation that continues what was recorded.

        The request that was answered last gets its answer again: its reply may have been lost.

        Raises:
            Conflict: it does not continue it.
            Ended: the session is over.
        """
        async with self._turn:
            self._check_open()
            if self._last and _same(messages, self._recorded[:-1]):
                return self._last
            self._check_continues(messages, offered)
            new = messages[len(self._recorded) :]
            request = _Request(messages, new, offered, asyncio.get_running_loop().create_future())
            self._inbox.put_nowait(request)
            return await asyncio.shield(request.answer)

    async def close(self, reward: float, metrics: dict[str, float]) -> pb.Trajectory:
        """Ends the task with a reward; returns the trajectory once it is complete.

        Raises:
            Conflict: there was no completion to reward.
            Ended: the session was over before.
        """
        async with self._turn:
            self._check_open()
            if self._last is None:
                raise Conflict("the session has no completion yet: there is nothing to reward; DELETE it instead")
            self._closing = True
            self._inbox.put_nowait(_Reward(reward, metrics))
        return await asyncio.shield(self.ended)

    def abandon(self) -> None:
        """The agent gives up."""
        self._check_open()
        self._closing = True
        self._inbox.put_nowait("the agent gave the session up")

    def _check_open(self) -> None:
        if self._why:
            raise Ended(f"the session is over: {self._why}")
        if self._closing:
            raise Ended("the session has been closed")

    def _check_continues(self, messages: list[pb.Message], offered: list[environment_pb.Tool]) -> None:
        known = len(self._recorded)
        if self._recorded and offered != self._tools:
            raise Conflict("the tools differ from those of the first request: a session keeps its tools")
        for number, (given, recorded) in enumerate(zip(messages, self._recorded, strict=False)):
            if not _same([given], [recorded]):
                raise Conflict(
                    f"messages[{number}] differs from what was recorded: a session's conversation can only be"
                    " continued; open another session for another conversation"
                )
        if len(messages) <= known:
            raise Conflict(f"messages holds {len(messages)} messages, of which none is new after the {known} recorded")
        for number, message in enumerate(messages[known:], known):
            if message.role == "assistant":
                raise Conflict(f"messages[{number}] is an assistant message that the policy has not written")

    # The episode's side.

    async def reset(self, task: pb.Task) -> environment_pb.InteractResponse:
        """The agent's first request."""
        step = await self._next(self._settings.reset_timeout_s)
        if step.terminated:
            raise EnvironmentFailure("contract", "the agent ended the episode before its first request")
        return step

    async def step(self, action: environment_pb.Action) -> environment_pb.InteractResponse:
        """Gives the agent its answer; what follows is its next request, or its reward."""
        turn, request = self.trajectory.turns[-1], self._waiting
        assert request is not None
        message = action.message
        if action.malformed_tool_calls:
            # An agent knows no malformed calls: it sees what was written.
            text = self._renderer.decode(token_ids(turn.action_token_ids))
            message = tools.parse(text, "none", thinking=self._thinking).message
        tokens = len(turn.action_token_ids) // 4
        before = (
            sum(len(t.observation_token_ids) + len(t.action_token_ids) for t in self.trajectory.turns) // 4 - tokens
        )
        reason = "tool_calls" if message.tool_calls else "stop"
        if turn.finish_reason == pb.FINISH_REASON_LENGTH:
            reason = "length"
        self._recorded, self._tools = [*request.conversation, message], request.tools
        self._last = Completion(message, reason, before, tokens)
        self._waiting = None
        _settle(request.answer, self._last)
        return await self._next(self._settings.step_timeout_s)

    def over(self, why: str) -> None:
        """No more is answered."""
        if self._why:
            return
        self._why = why
        unanswered = [self._waiting]
        while not self._inbox.empty():
            unanswered.append(_request_of(self._inbox.get_nowait()))
        for request in unanswered:
            if request is not None and not request.answer.done():
                request.answer.set_exception(Ended(f"the session is over: {why}"))
        if self.trajectory.status:
            _settle(self.ended, self.trajectory)
        elif not self.ended.done():
            self.ended.set_exception(Ended(f"the session is over: {why}"))
            self.ended.exception()  # nobody need ask

    async def _next(self, timeout_s: float) -> environment_pb.InteractResponse:
        try:
            async with asyncio.timeout(timeout_s):
                said = await self._inbox.get()
        except TimeoutError as error:
            raise EnvironmentFailure("abandoned", f"the agent said nothing for {timeout_s:g} s") from error
        if isinstance(said, str):
            raise EnvironmentFailure("abandoned", said)
        if isinstance(said, _Reward):
            return environment_pb.InteractResponse(reward=said.reward, metrics=said.metrics, terminated=True)
        self._waiting = said
        return environment_pb.InteractResponse(messages=said.new, tools=said.tools)


class Agents:
    """An environment whose episodes agents outside drive: a Source of seats, a desk where sessions are claimed."""

    def __init__(self, name: str, settings: config.Environment, renderer: Renderer, *, thinking: str):
        self.name = name
        self.settings = settings
        self._renderer, self._thinking = renderer, thinking
        self._offers: list[tuple[pb.Task, asyncio.Future[AgentSession]]] = []
        self._offered = asyncio.Condition()
        self._open: dict[str, AgentSession] = {}
        self._gone: OrderedDict[str, AgentSession] = OrderedDict()

    @contextlib.asynccontextmanager
    async def place(self, task: pb.Task) -> AsyncIterator[AgentSeat]:
        """A place in an episode of the task, once an agent has claimed it."""
        seat = AgentSeat(self, task)
        if task.purpose != pb.PURPOSE_DEMONSTRATION:
            seat.claimed = await self.offer(task)
        try:
            yield seat
        finally:
            seat.end()

    async def offer(self, task: pb.Task) -> AgentSession:
        """Returns the session of the agent that claims the task."""
        claimed: asyncio.Future[AgentSession] = asyncio.get_running_loop().create_future()
        offer = (task, claimed)
        self._offers.append(offer)
        try:
            async with self._offered:
                self._offered.notify_all()
            return await claimed
        except asyncio.CancelledError:
            if claimed.done() and not claimed.cancelled():
                self.forget(claimed.result(), "the episode was cancelled")
            raise
        finally:
            if offer in self._offers:
                self._offers.remove(offer)

    async def claim(self, fits: Callable[[pb.Task], bool], wait_s: float) -> AgentSession | None:
        """A session of the first task offered that fits; None when there is none in time."""
        try:
            async with asyncio.timeout(wait_s), self._offered:
                while True:
                    for offer in self._offers:
                        task, claimed = offer
                        if fits(task) and not claimed.done():
                            self._offers.remove(offer)
                            session = AgentSession(task, self.settings, self._renderer, self._thinking)
                            self._open[session.session_id] = session
                            claimed.set_result(session)
                            return session
                    await self._offered.wait()
        except TimeoutError:
            return None

    def find(self, session_id: str) -> AgentSession | None:
        """The session of that id, also a while after its end."""
        return self._open.get(session_id) or self._gone.get(session_id)

    def forget(self, session: AgentSession, why: str) -> None:
        """Ends a session."""
        session.over(why)
        if self._open.pop(session.session_id, None):
            self._gone[session.session_id] = session
            while len(self._gone) > _REMEMBERED:
                self._gone.popitem(last=False)


class AgentSeat:
    """An episode's place: sessions of agents, one after the other."""

    def __init__(self, agents: Agents, task: pb.Task):
        self.claimed: AgentSession | None = None
        self._agents, self._task = agents, task
        self._trajectory = pb.Trajectory()
        self._last: AgentSession | None = None

    def begin(self, trajectory: pb.Trajectory) -> None:
        self._trajectory = trajectory

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[AgentSession]:
        """The session that was claimed with the place; later ones wait for another agent."""
        if self._task.purpose == pb.PURPOSE_DEMONSTRATION:
            raise EnvironmentRefusal(f"environment {self._agents.name!r} has agents outside, and no expert")
        session = self.claimed or await self._agents.offer(self._task)
        self.claimed, self._last = None, session
        session.trajectory = self._trajectory
        try:
            yield session
        except BaseException as error:
            self._agents.forget(session, str(error) or "the episode was cut off")
            raise

    def end(self) -> None:
        """Tells the last agent how the episode ended."""
        for session in (self.claimed, self._last):
            if session is not None:
                status = self._trajectory.status
                detail = self._trajectory.status_detail
                why = f"{status_name(status)}{detail and ': '}{detail}" if status else "the episode was cancelled"
                self._agents.forget(session, why)


def _same(one: Sequence[pb.Message], other: Sequence[pb.Message]) -> bool:
    """Whether two conversations are the same to the chat template, as far as agents repeat our messages faithfully."""
    return len(one) == len(other) and all(_key(a) == _key(b) for a, b in zip(one, other, strict=True))


def _key(message: pb.Message) -> object:
    if message.role != "assistant":
        return message.SerializeToString(deterministic=True)
    calls = [(call.id, call.name, json.loads(call.arguments_json)) for call in message.tool_calls]
    return "assistant", message.content.strip(), calls


def _settle[T](future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _request_of(said: _Request | _Reward | str) -> _Request | None:
    return said if isinstance(said, _Request) else None
