"""TrainerService over gRPC: translates between the wire and the weight store and status. Holds no weights itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from urllib.parse import unquote

import grpc
import grpc.aio

from headrace import address
from headrace.bulk import BulkServer
from headrace.v1 import trainer_service_pb2 as pb
from headrace.weight_service import CHUNK_BYTES, SERVICE, WeightServicer
from services.trainer.fanout import Fanout, Watcher
from services.trainer.status import Status
from services.trainer.weights import WeightStore

__all__ = ["SERVICE", "Engines", "TrainerServicer"]

log = logging.getLogger(__name__)

_ABSENCE_S = 60.0  # an engine that installs a version does not watch meanwhile


class Engines:
    """The engines that watch, and the version that each said it holds when it last began to."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._watching: dict[str, int] = {}
        self._left: dict[str, float] = {}
        self._addresses: dict[str, str] = {}
        self.sent_bytes: Counter[str] = Counter()
        self._news = asyncio.Event()

    def enter(self, engine: str, held: int, serving_address: str = "") -> None:
        """An engine begins to watch. It serves weights at the address, or nowhere."""
        now = time.monotonic()
        for gone in [name for name in self._held if not self._is_here(name, now)]:
            del self._held[gone], self._watching[gone], self._left[gone], self._addresses[gone]
        self._held[engine], self._addresses[engine] = held, serving_address
        self._watching[engine] = self._watching.get(engine, 0) + 1
        self._news.set()
        self._news = asyncio.Event()

    def sent(self, kind: str, size_bytes: int) -> None:
        """So many bytes of weights, "full" or "delta", have gone to engines."""
        self.sent_bytes[kind] += size_bytes

    def leave(self, engine: str) -> None:
        """One of its watches ended."""
        self._watching[engine] -= 1
        self._left[engine] = time.monotonic()

    @property
    def versions(self) -> dict[str, int]:
        """Version by engine, of those that watch or did a short while ago; 0 is none. Any thread may ask."""
        now = time.monotonic()
        return {engine: held for engine, held in self._held.copy().items() if self._is_here(engine, now)}

    @property
    def watchers(self) -> dict[str, Watcher]:
        """Those that watch at this moment."""
        return {
            engine: Watcher(held, self._addresses[engine])
            for engine, held in self._held.items()
            if self._watching[engine]
        }

    async def all_hold(self, version: int) -> None:
        """Returns when every engine holds this version or a newer one."""
        while any(held < version for held in self.versions.values()):
            await self._news.wait()

    def _is_here(self, engine: str, now_s: float) -> bool:
        return self._watching.get(engine, 0) > 0 or now_s - self._left.get(engine, -_ABSENCE_S) < _ABSENCE_S


class TrainerServicer(WeightServicer):
    """Answers engines, launchers and people."""

    def __init__(
        self,
        store: WeightStore,
        status: Status,
        engines: Engines,
        *,
        bulk: BulkServer | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ):
        """For the last two see WeightServicer."""
        super().__init__(store, run_id=status.run_id, bulk=bulk, count=engines.sent, chunk_bytes=chunk_bytes)
        self._store, self._status, self._engines = store, status, engines
        self._fanout = Fanout()

    async def WatchWeights(
        self, request: pb.WatchWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchWeightsResponse]:
        """Announces versions until the caller leaves or the run ends."""
        engine, held = request.engine, request.held_policy_version
        log.debug("engine %s watches and holds version %d", engine, held)
        self._engines.enter(engine, held, _reachable(request.serving_address, context.peer()))
        try:
            async for snapshot in self._store.watch():
                version = snapshot.policy_version
                base = held if self._store.has_delta(version, held) else None
                yield pb.WatchWeightsResponse(
                    run_id=self._status.run_id,
                    policy_version=version,
                    root_hash=snapshot.manifest.root_hash,
                    size_bytes=snapshot.size_bytes,
                    peers=self._peers(request, version, base) if held < version else [],
                )
        finally:
            self._engines.leave(engine)

    def _peers(self, request: pb.WatchWeightsRequest, version: int, base: int | None) -> list[pb.WeightPeer]:
        return self._fanout.peers(request.engine, version, base, self._engines.watchers, request.failed_peers)

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


def _reachable(serving_address: str, peer: str) -> str:
    """The address with the caller's host where it leaves that out; "" for what is none.

    Args:
        peer: as gRPC describes a caller: "ipv4:10.0.0.7:41524" or "ipv6:%5B::1%5D:41524".
    """
    try:
        host, port = address.split(serving_address)
        caller, _ = address.split(unquote(peer.partition(":")[2]))
    except ValueError:
        return ""
    host = host or caller
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
