"""The trainer's weight service in this process, and pullers as processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace import rpc
from headrace.bulk import BulkServer
from headrace.v1 import trainer_service_pb2_grpc
from headrace.weight_service import CHUNK_BYTES
from services.trainer.server import SERVICE, Engines, TrainerServicer
from services.trainer.snapshot import Snapshot, take_snapshot
from services.trainer.status import Status
from services.trainer.weights import WeightStore
from tests.processes import ROOT

DEADLINE_S = 90


@dataclass(frozen=True)
class Service:
    """What a trainer shows of its weights."""

    store: WeightStore
    engines: Engines
    servicer: TrainerServicer
    address: str

    def publish(self, version: int, tensors: Mapping[str, np.ndarray]) -> Snapshot:
        """Makes a version of the arrays, which must not change any more."""
        snapshot = take_snapshot(version, tensors.items())
        self.store.publish(snapshot)
        return snapshot


@contextlib.asynccontextmanager
async def trainer(
    *, kept_versions: int = 2, delta_bases: int = 2, chunk_bytes: int = CHUNK_BYTES, bulk: bool = True, **store: float
) -> AsyncIterator[Service]:
    """A trainer of run "run" that only publishes."""
    kept, engines = WeightStore(kept_versions=kept_versions, delta_bases=delta_bases, **store), Engines()
    port = BulkServer.start("127.0.0.1:0") if bulk else None
    servicer = TrainerServicer(kept, Status("run", 1), engines, bulk=port, chunk_bytes=chunk_bytes)
    add = trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server
    server = await rpc.Server.start("127.0.0.1:0", [rpc.Service(SERVICE, add, servicer)])
    try:
        yield Service(kept, engines, servicer, f"127.0.0.1:{server.port}")
    finally:
        kept.close()
        await server.stop(0)
        if port:
            await port.stop()


class Puller:
    """A puller's process."""

    def __init__(self, process: Process):
        self._process = process

    async def report(self, version: int) -> dict[str, Any]:
        """What it says of a version, once it has it; what it said of earlier ones is passed over."""
        assert self._process.stdout
        async with asyncio.timeout(DEADLINE_S):
            while True:
                line = await self._process.stdout.readline()
                assert line, "the puller has ended"
                report = json.loads(line)
                if report["policy_version"] == version:
                    return report

    def kill(self) -> None:
        """As the kernel's out-of-memory killer does."""
        self._process.kill()


@contextlib.asynccontextmanager
async def pullers(address: str, *arguments: Sequence[str]) -> AsyncIterator[list[Puller]]:
    """One process for each list of arguments of tests.inference.puller."""
    processes = []
    try:
        for number, extra in enumerate(arguments):
            command = ["-m", "tests.inference.puller", "--trainer", address, "--name", f"engine-{number}", *extra]
            processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, limit=1 << 24
                )
            )
        yield [Puller(process) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def all_watch(service: Service, count: int, *, held: int = 0) -> None:
    """Returns when so many engines watch and hold the version."""
    async with asyncio.timeout(DEADLINE_S):
        while sum(watcher.held == held for watcher in service.engines.watchers.values()) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
