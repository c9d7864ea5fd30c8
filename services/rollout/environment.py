"""Client of EnvironmentService: one stream is one episode, one request gets one checked time step.

`Environment.session` opens the stream and always closes it. Each response has a deadline. What can go wrong has three
names, and the episode decides what to do about each:

    EnvironmentBusy       at capacity: the same task may be tried again, another replica may have room
    EnvironmentFailure    it raised, died, hung or broke its contract: a fresh session may do better
    EnvironmentRefusal    it does not know the task, or has no expert: no session will do better

A server that is not up yet is waited for within the deadline of the reset. Calls go round the hosts that the address
resolves to, so the next session may reach another replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from headrace import config, images, rpc, tracing
from headrace.security import PLAIN, Security
from headrace.v1 import environment_service_pb2 as pb
from headrace.v1 import environment_service_pb2_grpc
from headrace.v1.trajectory_pb2 import PURPOSE_DEMONSTRATION, Message, Task, Trajectory
from services.rollout import metrics

log = logging.getLogger(__name__)

_ROLES_OF_A_PROMPT = frozenset({"system", "user", "assistant", "tool"})
_ROLES_OF_AN_ANSWER = frozenset({"user", "tool"})
_CLOSE_TIMEOUT_S = 1.0
_REFUSALS = frozenset(
    {
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)


class EnvironmentBusy(Exception):
    """The server runs as many episodes as it may."""


class EnvironmentRefusal(Exception):
    """The server will never run this task."""


class EnvironmentFailure(Exception):
    """The environment failed this session. `reason` is one word for metrics."""

    def __init__(self, reason: str, message: str):
        self.reason = reason
        super().__init__(message)


class Environment:
    """One environment of the run, whatever number of replicas serve it."""

    def __init__(self, name: str, settings: config.Environment, security: Security = PLAIN):
        self.name = name
        self.settings = settings
        limit = settings.gateway_max_episodes
        self._places = asyncio.Semaphore(limit) if limit else contextlib.nullcontext()
        self._security = security
        self._told = ""
        self._channel = rpc.channel(settings.address, foreign=True, security=security)
        self._stub: Any = environment_service_pb2_grpc.EnvironmentServiceStub(self._channel)

    @contextlib.asynccontextmanager
    async def place(self, task: Task) -> AsyncIterator[Environment]:
        """A place for an episode: at once, or as soon as fewer than gateway_max_episodes run here."""
        with metrics.waiting_episodes.labels(self.name).track_inprogress():
            await self._places.__aenter__()
        try:
            yield self
        finally:
            await self._places.__aexit__(None, None, None)

    def begin(self, trajectory: Trajectory) -> None:
        """Nobody here looks on."""

    def end(self) -> None:
        """Nobody here waits for it."""

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A stream to some replica; it ends with the body, and with it the replica's episode."""
        call = self._stub.Interact(wait_for_ready=True, metadata=tracing.metadata())
        session = Session(call, self.settings)
        try:
            yield session
            await session.close()
        except EnvironmentRefusal as refusal:
            self._tell(str(refusal))
            raise
        except EnvironmentFailure as failure:
            metrics.environment_failures.labels(self.name, failure.reason).inc()
            raise
        finally:
            call.cancel()

    def _tell(self, refusal: str) -> None:
        """Logs why no episode will go well; not for each of them."""
        if refusal != self._told:
            log.error("environment %s: %s", self.name, refusal)
            self._told = refusal

    async def explain_failures(self) -> None:
        """Logs why no connection comes about, until it is cancelled."""
        await rpc.explain_failures(self._channel, self.settings.address, self._security)

    async def close(self) -> None:
        """Closes the connections."""
        await self._channel.close()


class Session:
    """One episode of the environment. Every method raises the module's three errors."""

    def __init__(self, call: Any, settings: config.Environment):
        self._call = call
        self._settings = settings
        self._demonstrates = False

    async def reset(self, task: Task) -> pb.InteractResponse:
        """Starts the task; the response holds the prompt."""
        self._demonstrates = task.purpose == PURPOSE_DEMONSTRATION
        step = await self._exchange(pb.InteractRequest(reset=task), self._settings.reset_timeout_s, "reset")
        if step.terminated or step.truncated:
            raise EnvironmentFailure("contract", "the reset ended the episode before its first action")
        self._check(step, _ROLES_OF_A_PROMPT)
        return step

    async def step(self, action: pb.Action) -> pb.InteractResponse:
        """Acts; the response holds what followed."""
        step = await self._exchange(pb.InteractRequest(action=action), self._settings.step_timeout_s, "step")
        self._check(step, _ROLES_OF_AN_ANSWER)
        return step

    async def close(self) -> None:
        """Tells the server that no more actions come; waits a moment for its end of the stream."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._call.done_writing()
                await self._call.read()

    async def _exchange(self, request: pb.InteractRequest, timeout_s: float, what: str) -> pb.InteractResponse:
        try:
            async with asyncio.timeout(timeout_s):
                await self._call.write(request)
                response = await self._call.read()
            if response is not grpc.aio.EOF:
                return response
            code, details = await self._call.code(), await self._call.details()
        except TimeoutError as error:
            raise EnvironmentFailure("deadline", f"no response to the {what} within {timeout_s:g} s") from error
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details()
        except asyncio.InvalidStateError:  # the stream ended while the policy was thinking
            code, details = await self._call.code(), await self._call.details()
        except asyncio.CancelledError:
            # The library raises this also when the server cancels the stream; only the former is a cancellation.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            code, details = grpc.StatusCode.CANCELLED, "the server cancelled the stream"
        raise _error(code, " ".join((details or "").split())[:300], what)

    def _check(self, step: pb.InteractResponse, roles: frozenset[str]) -> None:
        """Raises EnvironmentFailure where the time step breaks the contract."""
        problem = ""
        if step.HasField("reward") and not math.isfinite(step.reward):
            problem = f"reward is {step.reward}"
        elif not all(math.isfinite(value) for value in step.metrics.values()):
            problem = f"metrics hold {dict(step.metrics)}"
        elif step.terminated and step.truncated:
            problem = "terminated and truncated are both set"
        elif not (step.terminated or step.truncated):
            if not step.messages:
                problem = "the episode is open but no message follows"
            elif self._demonstrates and not _demonstrates(step.demonstration):
                problem = "the episode is open but no assistant message demonstrates what to do"
        if not problem and not all(message.role in roles for message in step.messages):
            problem = f"message roles are {[message.role for message in step.messages]}, not of {sorted(roles)}"
        if problem:
            raise EnvironmentFailure("contract", problem)
        try:
            for message in step.messages:
                images.check(message)
        except images.ImageError as error:
            raise EnvironmentFailure("contract", str(error)) from error


def _demonstrates(message: Message) -> bool:
    return message.role == "assistant" and bool(message.content or message.tool_calls)


def _error(code: grpc.StatusCode, details: str, what: str) -> Exception:
    text = f"{what}: {code.name}: {details}" if details else f"{what}: {code.name}"
    if code == grpc.StatusCode.OK:
        return EnvironmentFailure("closed", f"the stream ended instead of answering the {what}")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and what == "reset":
        return EnvironmentBusy(text)
    if code in _REFUSALS:
        return EnvironmentRefusal(text)
    if code == grpc.StatusCode.INTERNAL:
        return EnvironmentFailure("raised", text)
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:  # the server's own, for a step
        return EnvironmentFailure("deadline", text)
    if code == grpc.StatusCode.UNAVAILABLE:
        return EnvironmentFailure("unavailable", text)
    return EnvironmentFailure("other", text)
