"""What this engine has of the weights on the host: the version that it holds, and the one that it is receiving.

The held version is what a difference is applied to and what peers are served; a version that is being received goes on
to peers tensor by tensor. In memory are at most the held version, the one that comes, and one that was replaced while a
peer read it; tensors that did not change are shared between them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import numpy as np

from headrace.shipment import Shipment
from headrace.v1 import trainer_service_pb2 as pb
from headrace.weight_service import Lease

_PATIENCE_S = 15.0  # a peer may hear of a version before this engine does


@dataclass(frozen=True)
class HeldWeights:
    """A version that is here whole."""

    manifest: pb.WeightManifest  # of the full version
    tensors: Mapping[str, np.ndarray]

    @property
    def policy_version(self) -> int:
        """Its number."""
        return self.manifest.policy_version


class Shelf:
    """Holds weights, and leases them to peers. For one event loop."""

    def __init__(self) -> None:
        self.held: HeldWeights | None = None
        self._full: dict[int, Shipment] = {}
        self._deltas: dict[int, Shipment] = {}
        self._leases: dict[int, set[Lease]] = {}
        self._changed = asyncio.Event()

    def receive(self, manifest: pb.WeightManifest) -> tuple[Shipment, Shipment | None]:
        """Begins to pass a version on, or goes on doing so after another sender's failure.

        Args:
            manifest: as it came, of all or of the difference.

        Returns:
            where the tensors go, and where what travelled for them goes.
        """
        version = manifest.policy_version
        held = self.held.policy_version if self.held else 0
        for other in [number for number in self._full if number not in (held, version)]:
            self.drop(other)
        full = self._full.get(version)
        if full is None or full.manifest.root_hash != manifest.root_hash:
            if full:
                full.fail()
            full = self._full[version] = Shipment(without_base(manifest))
        delta = self._deltas.get(version)
        if delta and delta.manifest == manifest:  # from another sender: whoever reads it reads on
            return full, delta
        if delta:
            self._deltas.pop(version).fail()
            delta = None
        if manifest.HasField("base_policy_version") and not full.arrived:
            delta = self._deltas[version] = Shipment(manifest)
        self._wake()
        return full, delta

    def drop(self, policy_version: int) -> None:
        """A version will not come whole."""
        for shipments in (self._full, self._deltas):
            if shipment := shipments.pop(policy_version, None):
                shipment.fail()

    def hold(self, weights: HeldWeights) -> None:
        """A version is here whole, in place of the one before, which at most those get who read it already."""
        previous = self.held
        self.held = weights
        for version in [number for number in self._full if number != weights.policy_version]:
            self.drop(version)
        for version, leases in self._leases.items():
            if previous and version < previous.policy_version:
                for lease in leases:
                    lease.revoke()
        self._wake()

    @contextlib.asynccontextmanager
    async def lease(self, policy_version: int, base_policy_version: int | None) -> AsyncIterator[Lease | None]:
        """What is sent to a peer: the difference that came, if it is to that base; else all of it."""
        shipment = await self._shipment(policy_version, base_policy_version)
        if shipment is None:
            yield None
            return
        lease = Lease(shipment)
        leases = self._leases.setdefault(policy_version, set())
        leases.add(lease)
        try:
            yield lease
        finally:
            leases.discard(lease)
            if not leases:
                self._leases.pop(policy_version, None)

    async def _shipment(self, version: int, base: int | None) -> Shipment | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while version not in self._full and (self.held is None or version > self.held.policy_version):
                    await self._changed.wait()
        delta = self._deltas.get(version)
        if delta and base is not None and delta.manifest.base_policy_version == base:
            return delta
        return self._full.get(version)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def without_base(manifest: pb.WeightManifest) -> pb.WeightManifest:
    """The manifest of the whole version that a difference leads to."""
    return pb.WeightManifest(
        policy_version=manifest.policy_version, tensors=manifest.tensors, root_hash=manifest.root_hash
    )
