"""Published weights: immutable host copies by version, watched and pulled by any number of engines.

A snapshot never changes once it is published and lives as long as somebody reads it, so a slow reader gets the version
that it asked for, whole, or NOT_FOUND; never a mixture.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from headrace import weights
from headrace.v1 import trainer_service_pb2 as pb

_CHUNK_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class Snapshot:
    """One version: its manifest and the bytes of each tensor, in the manifest's order."""

    manifest: pb.WeightManifest
    data: tuple[memoryview, ...]

    @property
    def policy_version(self) -> int:
        """Its number."""
        return self.manifest.policy_version

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(len(data) for data in self.data)

    def chunks(self) -> Iterator[pb.WeightChunk]:
        """All bytes in order, in pieces of about 2 MiB."""
        for index, data in enumerate(self.data):
            for offset in range(0, len(data), _CHUNK_BYTES):
                piece = bytes(data[offset : offset + _CHUNK_BYTES])
                yield pb.WeightChunk(tensor_index=index, offset=offset, data=piece)


def take_snapshot(policy_version: int, tensors: Iterable[tuple[str, np.ndarray]]) -> Snapshot:
    """Hashes host arrays that nobody else will write to. Takes long for a large model: not for the event loop."""
    infos, data = [], []
    for name, array in tensors:
        contiguous = np.ascontiguousarray(array)
        infos.append(weights.tensor_info(name, contiguous))
        data.append(weights.tensor_bytes(contiguous).toreadonly())
    manifest = pb.WeightManifest(policy_version=policy_version, tensors=infos, root_hash=weights.root_hash(infos))
    return Snapshot(manifest, tuple(data))


class WeightStore:
    """The newest versions. For one event loop."""

    def __init__(self, *, kept_versions: int):
        self._kept_versions = kept_versions
        self._snapshots: dict[int, Snapshot] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def publish(self, snapshot: Snapshot) -> None:
        """Makes a version available, and the oldest unavailable to new readers when there are too many."""
        assert all(version < snapshot.policy_version for version in self._snapshots), "versions grow"
        self._snapshots[snapshot.policy_version] = snapshot
        while len(self._snapshots) > self._kept_versions:
            del self._snapshots[min(self._snapshots)]
        self._wake()

    def get(self, policy_version: int) -> Snapshot | None:
        """A version, while it is kept."""
        return self._snapshots.get(policy_version)

    async def watch(self) -> AsyncIterator[Snapshot]:
        """The newest version at once, then each newer one until `close`; a slow caller gets only the newest."""
        seen = 0
        while not self._closed:
            changed = self._changed
            newest = max(self._snapshots, default=0)
            if newest > seen:
                seen = newest
                yield self._snapshots[newest]
            else:
                await changed.wait()

    def close(self) -> None:
        """Ends every watch."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
