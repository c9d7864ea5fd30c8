"""One episode on one environment object: requests in, exactly one response each, out of order refused.

What the environment raises or breaks becomes a Refused with a gRPC code and one line; nothing else leaves this module.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from headrace import tracing
from headrace.v1 import environment_service_pb2 as pb
from headrace.v1 import trajectory_pb2
from services.envs import contract, metrics
from services.envs.environment import Environment

log = logging.getLogger(__name__)

MAX_LINE_CHARACTERS = 500


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, code: grpc.StatusCode, message: str, *, cause: str):
        """`cause` is the label under which the failure is counted."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.cause = cause


class Episode:
    """The state between two requests."""

    def __init__(self, environment: Environment, task: trajectory_pb2.Task, *, timeout_s: float | None = None):
        """`timeout_s` is what a reset or a step may take, in seconds; None: the environment's `step_timeout_s`."""
        self.ended = False
        self._timeout_s = environment.step_timeout_s if timeout_s is None else timeout_s
        self._environment = environment
        self._task = task
        self._rewarded = False

    async def reset(self) -> pb.InteractResponse:
        """Resets the environment to the task. Raises Refused."""
        return await self._call("reset", lambda: self._environment.reset(self._task))

    async def act(self, request: pb.InteractRequest) -> pb.InteractResponse:
        """Steps the environment. Raises Refused, also for a request that is no action, or after the end."""
        kind = request.WhichOneof("request")
        if kind is None:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "the request is empty: send an action", cause="order")
        if kind == "reset":
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION, "one stream is one episode: open another to reset", cause="order"
            )
        if self.ended:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION, "the episode has ended: it takes no action", cause="order"
            )
        return await self._call("step", lambda: self._environment.step(request.action))

    async def _call(self, name: str, call: Callable[[], Awaitable[Any]]) -> pb.InteractResponse:
        started = time.perf_counter()
        with tracing.span(name):
            step = await self._guarded(name, call)
        metrics.step_seconds.labels(self._task.environment, name).observe(time.perf_counter() - started)
        metrics.steps.labels(self._task.environment).inc()
        try:
            answer = contract.response(
                step,
                after_reset=name == "reset",
                rewarded=self._rewarded,
                metric_names=self._environment.metric_names,
            )
        except contract.ContractError as error:
            log.error("%s broke its contract in task %s: %s %s", self._name, self._task.task_id, name, error)
            raise Refused(grpc.StatusCode.INTERNAL, f"{name} {error}", cause="contract") from error
        self._rewarded |= answer.HasField("reward")
        self.ended = answer.terminated or answer.truncated
        if self._task.purpose == trajectory_pb2.PURPOSE_DEMONSTRATION and not self.ended:
            answer.demonstration.CopyFrom(await self._demonstration(after_reset=name == "reset"))
        return answer

    async def _demonstration(self, *, after_reset: bool) -> trajectory_pb2.Message:
        message = await self._guarded("demonstrate", self._environment.demonstrate)
        if message is None and after_reset:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION, f"{self._name} has no expert to demonstrate", cause="no_expert"
            )
        if not isinstance(message, trajectory_pb2.Message) or message.role != "assistant":
            raise Refused(grpc.StatusCode.INTERNAL, "demonstrate returned no assistant message", cause="contract")
        return message

    async def _guarded(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await call()
        except TimeoutError as error:
            if not deadline.expired():
                raise self._raised(name, error) from error
            log.error("%s took too long in %s of task %s", self._name, name, self._task.task_id)
            message = f"{name} took longer than {self._timeout_s:g} s"
            raise Refused(grpc.StatusCode.DEADLINE_EXCEEDED, message, cause="deadline") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the stream has gone
                raise
            raise self._raised(name, error) from error  # something of the author's own was cancelled
        except (Exception, SystemExit) as error:  # the author's code may raise anything, and only the episode pays
            raise self._raised(name, error) from error

    def _raised(self, name: str, error: BaseException) -> Refused:
        log.exception("%s raised in %s of task %s", self._name, name, self._task.task_id)
        line = " ".join(f"{name} raised {type(error).__name__}: {error}".split())
        return Refused(grpc.StatusCode.INTERNAL, line[:MAX_LINE_CHARACTERS], cause="raised")

    @property
    def _name(self) -> str:
        return type(self._environment).__name__
