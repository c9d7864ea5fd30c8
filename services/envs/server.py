"""Serves environments over gRPC: one Interact stream is one episode on an environment object of its own.

Each stream waits for its client's next request or for its environment, nothing else. The environment is closed exactly
once, when the episode ends or when the stream does: half-closed, cancelled, disconnected, failed or shut down. A slot
of the capacity is free again when the environment has closed.

It is a context: at its start each environment sets up what its episodes share, and its end closes that and the worker
processes of their blocking calls. Outside it no episode is accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn

import grpc
import grpc.aio

from headrace import tracing
from headrace.v1 import environment_service_pb2 as pb
from headrace.v1 import environment_service_pb2_grpc, trajectory_pb2
from services.envs import metrics
from services.envs.blocking import Workers
from services.envs.environment import Environment
from services.envs.episode import MAX_LINE_CHARACTERS, Episode, Refused

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name

_PURPOSES = (
    trajectory_pb2.PURPOSE_TRAINING,
    trajectory_pb2.PURPOSE_EVALUATION,
    trajectory_pb2.PURPOSE_DEMONSTRATION,
)


class EnvironmentServer(environment_service_pb2_grpc.EnvironmentServiceServicer):
    """Answers the EnvironmentService."""

    def __init__(
        self,
        environments: Mapping[str, Callable[[], Environment]],
        *,
        capacity: int,
        step_timeout_s: float | None = None,
        close_timeout_s: float = 30.0,
    ):
        """Offers `environments`, by the names that tasks carry; each call makes an object for one episode.

        Args:
            capacity: episodes at once, of all environments together.
            step_timeout_s: what a reset or a step may take, in place of the environment's own `step_timeout_s`.
            close_timeout_s: what an environment's close may take; one that takes longer is logged and given up.

        Raises what making an object raises: one of each is made here to read its splits and metrics.
        """
        self._makers = dict(environments)
        self._first = {name: make() for name, make in sorted(environments.items())}
        self._infos = {name: _info(name, environment) for name, environment in self._first.items()}
        self._splits = {name: {split.name for split in info.splits} for name, info in self._infos.items()}
        self._workers = {
            name: Workers(environment.blocking_workers, name=name) for name, environment in self._first.items()
        }
        self._shared: dict[str, Any] = {}
        self._is_set_up = False
        self._contexts = contextlib.AsyncExitStack()
        self._capacity = capacity
        self._step_timeout_s = step_timeout_s
        self._close_timeout_s = close_timeout_s
        self._active = 0
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> EnvironmentServer:
        """Raises what an environment's setup raises."""
        async with contextlib.AsyncExitStack() as stack:
            for name, environment in self._first.items():
                environment.executor = await stack.enter_async_context(self._workers[name])
                self._shared[name] = await stack.enter_async_context(environment.setup())
            self._contexts = stack.pop_all()
        self._is_set_up = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_set_up = False
        await self.closed()
        await self._contexts.aclose()

    async def ListEnvironments(
        self, request: pb.ListEnvironmentsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListEnvironmentsResponse:
        """What this server offers."""
        return pb.ListEnvironmentsResponse(environments=self._infos.values())

    async def Interact(
        self, requests: AsyncIterator[pb.InteractRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Runs one episode. A coroutine, not a generator: a generator is not unwound when its stream is cancelled."""
        name = "unknown"
        try:
            opening = await anext(requests, None)
            if opening is None:
                return
            task = self._accept(opening)
            name = task.environment
            traceparent = tracing.of_metadata(context.invocation_metadata())
            with tracing.received("Interact", traceparent, environment=name):
                await self._run(task, requests, context.write)
        except Refused as refused:
            metrics.failures.labels(name, refused.cause).inc()
            await context.abort(refused.code, refused.message)
        except asyncio.CancelledError:
            metrics.failures.labels(name, "cancelled").inc()
            raise

    async def closed(self) -> None:
        """Returns when every environment of an ended stream has closed."""
        while self._closing:
            await asyncio.wait(self._closing)

    async def _run(
        self,
        task: trajectory_pb2.Task,
        requests: AsyncIterator[pb.InteractRequest],
        write: Callable[[pb.InteractResponse], Awaitable[None]],
    ) -> None:
        with self._environment(task.environment) as environment:
            episode = Episode(environment, task, timeout_s=self._step_timeout_s)
            await write(await episode.reset())
            while not episode.ended:
                request = await anext(requests, None)
                if request is None:
                    return
                await write(await episode.act(request))
        async for request in requests:
            await episode.act(request)

    def _accept(self, opening: pb.InteractRequest) -> trajectory_pb2.Task:
        """The task of a stream's first request. Raises Refused."""
        if opening.WhichOneof("request") != "reset":
            _refuse(grpc.StatusCode.FAILED_PRECONDITION, "the first request of a stream must reset", "order")
        task = opening.reset
        if not self._is_set_up:
            _refuse(grpc.StatusCode.UNAVAILABLE, "the environment is still being set up", "set_up")
        if task.environment not in self._makers:
            known = ", ".join(self._infos)
            _refuse(grpc.StatusCode.NOT_FOUND, f"no environment {task.environment!r} here, but {known}", "not_found")
        if task.split not in self._splits[task.environment]:
            known = ", ".join(sorted(self._splits[task.environment]))
            _refuse(
                grpc.StatusCode.NOT_FOUND, f"no split {task.split!r} of {task.environment}, but {known}", "not_found"
            )
        if task.purpose not in _PURPOSES or task.index < 0:
            _refuse(grpc.StatusCode.INVALID_ARGUMENT, "the task needs a purpose and an index of 0 or more", "invalid")
        if self._active >= self._capacity:
            message = f"all {self._capacity} episodes of this server are taken: try another replica"
            _refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, message, "capacity")
        return task

    @contextlib.contextmanager
    def _environment(self, name: str) -> Iterator[Environment]:
        self._active += 1
        metrics.active_episodes.labels(name).inc()
        environment: Environment | None = None
        try:
            environment = self._make(name)
            yield environment
        finally:
            # A task of its own: nobody waits for a slow close, and a cancelled stream cannot interrupt it.
            closing = asyncio.create_task(self._close(name, environment))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _make(self, name: str) -> Environment:
        try:
            environment = self._makers[name]()
            environment.executor, environment.shared = self._workers[name], self._shared[name]
            return environment
        except Exception as error:
            log.exception("%s cannot be made", name)
            line = " ".join(f"{name} cannot be made: {type(error).__name__}: {error}".split())
            raise Refused(grpc.StatusCode.INTERNAL, line[:MAX_LINE_CHARACTERS], cause="raised") from error

    async def _close(self, name: str, environment: Environment | None) -> None:
        try:
            if environment is not None:
                async with asyncio.timeout(self._close_timeout_s):
                    await environment.close()
        except (Exception, SystemExit):  # the author's code may raise anything; the episode itself is over
            metrics.failures.labels(name, "close").inc()
            log.exception("%s raised or hung in close", name)
        finally:
            self._active -= 1
            metrics.active_episodes.labels(name).dec()


def _info(name: str, environment: Environment) -> pb.EnvironmentInfo:
    description = (inspect.getdoc(type(environment)) or "").partition("\n")[0]
    splits = [pb.SplitInfo(name=split, task_count=count) for split, count in sorted(environment.splits.items())]
    return pb.EnvironmentInfo(
        name=name, description=description, splits=splits, metric_names=sorted(environment.metric_names)
    )


def _refuse(code: grpc.StatusCode, message: str, cause: str) -> NoReturn:
    raise Refused(code, message, cause=cause)
