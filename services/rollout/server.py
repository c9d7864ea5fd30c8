"""RolloutService: look at a gateway, drain it, and have it run episodes that nobody trains on.

Translates calls to the scheduler and the episode loop; holds nothing itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
from prometheus_client import REGISTRY

from headrace import tracing
from headrace.trajectory import RecordError, check_task
from headrace.v1 import rollout_service_pb2 as pb
from headrace.v1 import rollout_service_pb2_grpc
from headrace.v1.trajectory_pb2 import Task
from services.rollout import metrics
from services.rollout.episode import Sampling, World, run_episode, sampling_of, unknown_environment
from services.rollout.scheduler import Scheduler
from services.rollout.slots import Lease, Slots

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["RolloutService"].full_name


class RolloutServicer(rollout_service_pb2_grpc.RolloutServiceServicer):
    """Answers for one gateway."""

    def __init__(self, scheduler: Scheduler, world: World, slots: Slots, *, gateway: str):
        self._scheduler = scheduler
        self._world = world
        self._slots = slots
        self._gateway = gateway

    async def RunEpisodes(self, request: pb.RunEpisodesRequest, context: Any) -> None:
        if self._scheduler.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{self._gateway} drains; ask another gateway")
        for code, problem in self._problems(request):
            await context.abort(code, problem)
        ended: asyncio.Queue[pb.RunEpisodesResponse] = asyncio.Queue()
        traceparent = tracing.of_metadata(context.invocation_metadata())
        with tracing.received("RunEpisodes", traceparent):
            await self._run(request, ended, context.write)

    async def _run(
        self,
        request: pb.RunEpisodesRequest,
        ended: asyncio.Queue[pb.RunEpisodesResponse],
        write: Callable[[pb.RunEpisodesResponse], Awaitable[None]],
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._start_episodes(request, ended, tasks))
            for _ in range(len(request.tasks) * request.episodes_per_task):
                await write(await ended.get())

    async def _start_episodes(
        self,
        request: pb.RunEpisodesRequest,
        ended: asyncio.Queue[pb.RunEpisodesResponse],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Starts an episode whenever a place is free."""
        queued_s = asyncio.get_running_loop().time()

        async def run(task: Task, trajectory_id: str) -> None:
            sampling = _sampling(task, request.sampling, self._world)
            trajectory = await run_episode(task, trajectory_id, world=self._world, sampling=sampling, queued_s=queued_s)
            ended.put_nowait(pb.RunEpisodesResponse(task=task, trajectory=trajectory))

        for task in request.tasks:
            for number in range(request.episodes_per_task):
                await self._slots.until(lambda: self._slots.free > 0)
                lease = self._slots.lease(1)
                episode = tasks.create_task(run(task, f"{task.task_id}-{number}"))
                episode.add_done_callback(functools.partial(_close, lease))

    def _problems(self, request: pb.RunEpisodesRequest) -> Iterator[tuple[grpc.StatusCode, str]]:
        sampling = request.sampling
        if request.episodes_per_task < 1:
            yield grpc.StatusCode.INVALID_ARGUMENT, "episodes_per_task must be at least 1"
        if sampling.HasField("temperature") and not 0 <= sampling.temperature < math.inf:
            yield grpc.StatusCode.INVALID_ARGUMENT, f"sampling.temperature is {sampling.temperature}; 0 is greedy"
        if sampling.HasField("max_action_tokens") and sampling.max_action_tokens < 1:
            yield grpc.StatusCode.INVALID_ARGUMENT, "sampling.max_action_tokens must be at least 1"
        for task in request.tasks:
            try:
                check_task(task)
            except RecordError as error:
                yield grpc.StatusCode.INVALID_ARGUMENT, str(error)
            if task.environment not in self._world.environments:
                yield grpc.StatusCode.NOT_FOUND, unknown_environment(task, self._world)

    async def GetRolloutStatus(self, request: pb.GetRolloutStatusRequest, context: Any) -> pb.GetRolloutStatusResponse:
        ended: dict[str, int] = {}
        for sample in next(iter(metrics.ended_episodes.collect())).samples:
            if sample.name.endswith("_total"):
                ended[sample.labels["status"]] = ended.get(sample.labels["status"], 0) + int(sample.value)
        return pb.GetRolloutStatusResponse(
            gateway=self._gateway,
            draining=self._scheduler.draining,
            running_groups=self._scheduler.running_groups,
            running_episodes=_value("headrace_rollout_running_episodes"),
            ended_episodes=ended,
            published_groups=_value("headrace_rollout_published_groups_total"),
            fenced_groups=_value("headrace_rollout_fenced_groups_total"),
            engines=[
                pb.EngineStatus(
                    url=engine.url,
                    healthy=engine.ready,
                    running_requests=engine.running,
                    policy_version=engine.policy_version,
                )
                for engine in self._world.engines.engines
            ],
        )

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        return pb.DrainResponse(unfinished_groups=await self._scheduler.drain(max(0.0, request.timeout_s)))


def _sampling(task: Task, wanted: pb.Sampling, world: World) -> Sampling:
    """The config's sampling with what the request sets instead."""
    sampling = sampling_of(task, world.settings)
    changes = {field.name: value for field, value in wanted.ListFields()}
    return dataclasses.replace(sampling, **changes)


def _close(lease: Lease, _: asyncio.Task[None]) -> None:
    lease.close()


def _value(metric: str) -> int:
    return int(REGISTRY.get_sample_value(metric) or 0)
