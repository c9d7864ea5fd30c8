"""What one GetWeights answer consists of: a manifest and, for each tensor in order, the bytes that travel for it.

A trainer has all of it. An engine that is still receiving a version passes each tensor on as soon as it has checked it:
whoever waits for a parcel waits until it is there or the shipment has failed. For one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from headrace import weights
from headrace.v1 import trainer_service_pb2 as pb


class ShipmentFailed(Exception):
    """The rest of a shipment will not come."""


class Shipment:
    """A manifest and its parcels, read-only bytes that never change."""

    def __init__(self, manifest: pb.WeightManifest, parcels: Iterable[memoryview] = ()):
        self.manifest = manifest
        self._parcels = list(parcels)
        self._sizes = parcel_sizes(manifest)
        self._failed = False
        self._changed = asyncio.Event()

    @property
    def size_bytes(self) -> int:
        """Bytes of all parcels, those included that are not there yet."""
        return sum(self._sizes)

    @property
    def arrived(self) -> int:
        """Number of parcels that are there: the first so many."""
        return len(self._parcels)

    @property
    def complete(self) -> bool:
        """Whether all are."""
        return self.arrived == len(self._sizes)

    def size_from(self, first: int) -> int:
        """Bytes of the parcels from this one on."""
        return sum(self._sizes[first:])

    def add(self, parcel: memoryview) -> None:
        """The next one has come."""
        assert len(parcel) == self._sizes[self.arrived], "a parcel has the size that the manifest gives"
        self._parcels.append(parcel)
        self._wake()

    def fail(self) -> None:
        """No more will come. Changes nothing when all are there."""
        self._failed = True
        self._wake()

    async def parcels(self, first: int, batch_bytes: int) -> Sequence[memoryview]:
        """The parcel `first`, once it is there, and those after it that are there too, up to about `batch_bytes`.

        Raises ShipmentFailed when it will not come.
        """
        while self.arrived <= first:
            if self._failed:
                raise ShipmentFailed
            await self._changed.wait()
        end, size = first, 0
        while end < self.arrived and (end == first or size + self._sizes[end] <= batch_bytes):
            size += self._sizes[end]
            end += 1
        return self._parcels[first:end]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def parcel_sizes(manifest: pb.WeightManifest) -> list[int]:
    """Bytes that travel for each tensor. Raises ValueError for a manifest that says nonsense."""
    if not manifest.parcels:
        return [weights.size_bytes(tensor) for tensor in manifest.tensors]
    if len(manifest.parcels) != len(manifest.tensors):
        raise ValueError("the manifest has not one parcel for each tensor")
    for tensor, parcel in zip(manifest.tensors, manifest.parcels, strict=True):
        most = 0 if parcel.encoding == pb.TENSOR_ENCODING_UNCHANGED else weights.size_bytes(tensor)
        exact = parcel.encoding == pb.TENSOR_ENCODING_FULL
        if not (parcel.size_bytes == most if exact else 0 <= parcel.size_bytes <= most):
            raise ValueError(f"{tensor.name}: a parcel of {parcel.size_bytes} bytes cannot be")
    return [parcel.size_bytes for parcel in manifest.parcels]
