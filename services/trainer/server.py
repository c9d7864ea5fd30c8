"""TrainerService over gRPC: translates between the wire and the weight store and status. Holds no weights itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from headrace.v1 import trainer_service_pb2 as pb
from headrace.v1 import trainer_service_pb2_grpc
from services.trainer.status import Status
from services.trainer.weights import WeightStore

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["TrainerService"].full_name
_ABSENCE_S = 60.0  # an engine that installs a version does not watch meanwhile


class Engines:
    """The engines that watch, and the version that each said it holds when it last began to."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._watching: dict[str, int] = {}
        self._left: dict[str, float] = {}
        self._news = asyncio.Event()

    def enter(self, engine: str, held: int) -> None:
        """An engine begins to watch."""
        now = time.monotonic()
        for gone in [name for name in self._held if not self._is_here(name, now)]:
            del self._held[gone], self._watching[gone], self._left[gone]
        self._held[engine] = held
        self._watching[engine] = self._watching.get(engine, 0) + 1
        self._news.set()
        self._news = asyncio.Event()

    def leave(self, engine: str) -> None:
        """One of its watches ended."""
        self._watching[engine] -= 1
        self._left[engine] = time.monotonic()

    @property
    def versions(self) -> dict[str, int]:
        """Version by engine, of those that watch or did a short while ago; 0 is none. Any thread may ask."""
        now = time.monotonic()
        return {engine: held for engine, held in self._held.copy().items() if self._is_here(engine, now)}

    async def all_hold(self, version: int) -> None:
        """Returns when every engine holds this version or a newer one."""
        while any(held < version for held in self.versions.values()):
            await self._news.wait()

    def _is_here(self, engine: str, now_s: float) -> bool:
        return self._watching.get(engine, 0) > 0 or now_s - self._left.get(engine, -_ABSENCE_S) < _ABSENCE_S


class TrainerServicer(trainer_service_pb2_grpc.TrainerServiceServicer):
    """Answers engines, launchers and people."""

    def __init__(self, store: WeightStore, status: Status, engines: Engines):
        self._store, self._status, self._engines = store, status, engines

    async def WatchWeights(
        self, request: pb.WatchWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchWeightsResponse]:
        """Announces versions until the caller leaves or the run ends."""
        log.debug("engine %s watches and holds version %d", request.engine, request.held_policy_version)
        self._engines.enter(request.engine, request.held_policy_version)
        try:
            async for snapshot in self._store.watch():
                yield pb.WatchWeightsResponse(
                    run_id=self._status.run_id,
                    policy_version=snapshot.policy_version,
                    root_hash=snapshot.manifest.root_hash,
                    size_bytes=snapshot.size_bytes,
                )
        finally:
            self._engines.leave(request.engine)

    async def GetWeights(
        self, request: pb.GetWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GetWeightsResponse]:
        """Sends a full snapshot. A base version is no promise of the caller's that the trainer must use."""
        if request.run_id != self._status.run_id:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this trainer works on run {self._status.run_id!r}, not on {request.run_id!r}",
            )
        snapshot = self._store.get(request.policy_version)
        if snapshot is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"version {request.policy_version} is not kept; watch for a newer one"
            )
            return
        yield pb.GetWeightsResponse(manifest=snapshot.manifest)
        for chunk in snapshot.chunks():
            yield pb.GetWeightsResponse(chunk=chunk)

    async def GetTrainerStatus(
        self, request: pb.GetTrainerStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetTrainerStatusResponse:
        """Tells how far the run is."""
        status = self._status
        return pb.GetTrainerStatusResponse(
            run_id=status.run_id,
            step=status.step,
            total_steps=status.total_steps,
            policy_version=status.policy_version,
            phase=status.phase,
            outstanding_tickets=status.outstanding_tickets,
            trained_groups=status.trained_groups,
            returned_groups=status.returned_by_reason(),
            reward_mean=status.reward_mean,
            idle_fraction=status.idle_fraction,
            staleness_mean=status.staleness_mean,
            staleness_max=status.staleness_max,
            engine_versions=self._engines.versions,
        )
