"""One published version on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from headrace import weights
from headrace.v1 import trainer_service_pb2 as pb


@dataclass(frozen=True)
class Snapshot:
    """Its manifest and the bytes of each tensor, in the manifest's order. Never changes."""

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


def take_snapshot(policy_version: int, tensors: Iterable[tuple[str, np.ndarray]]) -> Snapshot:
    """Hashes host arrays that nobody else will write to. Takes long for a large model: not for the event loop."""
    infos, data = [], []
    for name, array in tensors:
        contiguous = np.asarray(array, order="C")
        infos.append(weights.tensor_info(name, contiguous))
        data.append(weights.tensor_bytes(contiguous).toreadonly())
    manifest = pb.WeightManifest(policy_version=policy_version, tensors=infos, root_hash=weights.root_hash(infos))
    return Snapshot(manifest, tuple(data))
