"""GetWeights as trainers and engines answer it: from what they hold, under a lease.

A transfer that lasts longer than its lease is cut, so that nobody who has stopped reading keeps a version in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

import grpc
import grpc.aio

from headrace.bulk import BulkServer
from headrace.shipment import Shipment, ShipmentFailed
from headrace.v1 import trainer_service_pb2 as pb
from headrace.v1 import trainer_service_pb2_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["TrainerService"].full_name
LEASE_S = 600.0
CHUNK_BYTES = 512 * 1024  # larger ones are slower unless glibc keeps freed memory

_TICKET_FROM_BYTES = 4 * 1024 * 1024  # below it a second connection is not worth its while


class Lease:
    """The right to read a shipment for a while."""

    def __init__(self, shipment: Shipment, seconds: float = LEASE_S):
        self.shipment = shipment
        self._ends_s = asyncio.get_running_loop().time() + seconds
        self._running: asyncio.Timeout | None = None

    def running(self) -> asyncio.Timeout:
        """What cuts its body short when the lease ends."""
        self._running = asyncio.timeout_at(self._ends_s)
        return self._running

    def revoke(self) -> None:
        """Ends it now."""
        self._ends_s = asyncio.get_running_loop().time()
        if self._running:
            self._running.reschedule(self._ends_s)

    @property
    def ended(self) -> bool:
        """Whether it has, with somebody still reading."""
        return self._running is not None and self._running.expired()


class Holder(Protocol):
    """Where versions are."""

    def lease(
        self, policy_version: int, base_policy_version: int | None
    ) -> contextlib.AbstractAsyncContextManager[Lease | None]:
        """What is to be sent, or None for a version that is not here. The base is a wish."""


class WeightServicer(trainer_service_pb2_grpc.TrainerServiceServicer):
    """Answers GetWeights, and refuses the rest of TrainerService."""

    def __init__(
        self,
        holder: Holder,
        *,
        run_id: str,
        chunk_bytes: int = CHUNK_BYTES,
        bulk: BulkServer | None = None,
        count: Callable[[str, int], None] = lambda kind, size_bytes: None,
    ):
        """
        Args:
            run_id: the run that its versions belong to.
            chunk_bytes: bytes of one message.
            bulk: what sends large shipments to callers that accept a ticket.
            count: told the kind ("full" or "delta") and bytes of what has been sent.
        """
        self._holder, self._run_id, self._chunk_bytes, self._bulk, self._count = (
            holder,
            run_id,
            chunk_bytes,
            bulk,
            count,
        )

    async def GetWeights(self, request: pb.GetWeightsRequest, context: grpc.aio.ServicerContext) -> None:
        """Sends a version, or what changed in it."""
        if request.run_id != self._run_id:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"weights of run {self._run_id!r} are here, not of {request.run_id!r}",
            )
        base = request.base_policy_version if request.HasField("base_policy_version") else None
        refusal = await self._answer(request, base, context)
        if refusal:  # only now, with the version let go: a caller who does not read does not read this either
            await context.abort(*refusal)

    async def _answer(
        self, request: pb.GetWeightsRequest, base: int | None, context: grpc.aio.ServicerContext
    ) -> tuple[grpc.StatusCode, str] | None:
        """Sends all of it, or returns the status that says why not."""
        version = request.policy_version
        async with self._holder.lease(version, base) as lease:
            if lease is None:
                return grpc.StatusCode.NOT_FOUND, f"version {version} is not kept; watch for a newer one"
            tensors = len(lease.shipment.manifest.tensors)
            if not 0 <= request.first_tensor <= tensors:
                return grpc.StatusCode.INVALID_ARGUMENT, f"version {version} has {tensors} tensors"
            try:
                async with lease.running():
                    await self._send(request, lease.shipment, context)
            except (ShipmentFailed, OSError) as error:  # OSError: TimeoutError too
                if lease.ended:
                    return grpc.StatusCode.ABORTED, f"version {version} was read for too long; watch for a newer one"
                return grpc.StatusCode.UNAVAILABLE, f"the transfer failed: {error}"
        return None

    async def _send(self, request: pb.GetWeightsRequest, shipment: Shipment, context: grpc.aio.ServicerContext) -> None:
        manifest, first = shipment.manifest, request.first_tensor
        kind = "delta" if manifest.HasField("base_policy_version") else "full"
        await context.write(pb.GetWeightsResponse(manifest=manifest))
        if self._bulk and request.accepts_ticket and shipment.size_from(first) >= _TICKET_FROM_BYTES:
            await self._bulk.send(
                shipment,
                first,
                announce=lambda ticket: context.write(pb.GetWeightsResponse(ticket=ticket)),
                count=lambda size_bytes: self._count(kind, size_bytes),
            )
            return
        for index in range(first, len(manifest.tensors)):
            parcel = (await shipment.parcels(index, 0))[0]
            for offset in range(0, len(parcel), self._chunk_bytes):
                data = bytes(parcel[offset : offset + self._chunk_bytes])
                chunk = pb.WeightChunk(tensor_index=index, offset=offset, data=data)
                await context.write(pb.GetWeightsResponse(chunk=chunk))
                self._count(kind, len(data))
