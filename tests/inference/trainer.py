"""A real TrainerService over tensors that a test chooses, with the faults that a test asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import grpc
import numpy as np

from headrace import rpc, weights
from headrace.v1 import trainer_service_pb2 as pb
from headrace.v1 import trainer_service_pb2_grpc

CHUNK_BYTES = 4096


class Trainer(trainer_service_pb2_grpc.TrainerServiceServicer):
    """Publishes versions; `damage_next` spoils that many transfers, `forget` makes a version NOT_FOUND."""

    def __init__(self, run_id: str = "test"):
        self.run_id = run_id
        self.damage_next = 0
        self.gets: list[int] = []
        self.watches: list[int | None] = []
        self._versions: dict[int, dict[str, np.ndarray]] = {}
        self._newest: int | None = None
        self._changed = asyncio.Condition()
        self._server: rpc.Server | None = None
        self.address = ""

    async def start(self, port: int = 0) -> Trainer:
        service = ("headrace.v1.TrainerService", trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server, self)
        self._server = await rpc.Server.start(f"127.0.0.1:{port}", [service])
        self.address = f"127.0.0.1:{self._server.port}"
        return self

    async def stop(self) -> None:
        assert self._server
        await self._server.stop(0)

    async def publish(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        """Announces the version; waits for nobody."""
        async with self._changed:
            self._versions[version] = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
            self._newest = version
            self._changed.notify_all()

    def forget(self, version: int) -> None:
        del self._versions[version]

    async def WatchWeights(
        self, request: pb.WatchWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchWeightsResponse]:
        self.watches.append(request.held_policy_version if request.HasField("held_policy_version") else None)
        told: int | None = None
        while True:
            async with self._changed:
                while self._newest == told:
                    await self._changed.wait()
                told = self._newest
            assert told is not None
            manifest = self._manifest(told)
            yield pb.WatchWeightsResponse(run_id=self.run_id, policy_version=told, root_hash=manifest.root_hash)

    async def GetWeights(
        self, request: pb.GetWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GetWeightsResponse]:
        self.gets.append(request.policy_version)
        if request.policy_version not in self._versions:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"version {request.policy_version} is not kept")
        damage, self.damage_next = self.damage_next > 0, max(0, self.damage_next - 1)
        yield pb.GetWeightsResponse(manifest=self._manifest(request.policy_version))
        for index, array in enumerate(self._versions[request.policy_version].values()):
            if index < request.first_tensor:
                continue
            data = bytearray(weights.tensor_bytes(array))
            if damage and index == 1:
                data[3] ^= 1
            for offset in range(0, len(data), CHUNK_BYTES):
                piece = bytes(data[offset : offset + CHUNK_BYTES])
                yield pb.GetWeightsResponse(chunk=pb.WeightChunk(tensor_index=index, offset=offset, data=piece))

    def _manifest(self, version: int) -> pb.WeightManifest:
        tensors = [weights.tensor_info(name, array) for name, array in self._versions.get(version, {}).items()]
        return pb.WeightManifest(policy_version=version, tensors=tensors, root_hash=weights.root_hash(tensors))
