"""Published weights: immutable host copies by version, watched and pulled by any number of engines.

A snapshot never changes once it is published, so a slow reader gets the version that it asked for, whole, or none;
never a mixture. Publishing waits for nobody. What is in memory is bounded:

    max(kept_versions, delta_bases + 1)   snapshots that new readers can get
    + 2                                   older ones that somebody still reads; past that the oldest's readers are cut
    + delta_bases                         differences to the newest, none larger than a snapshot, made when asked for
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from headrace.shipment import Shipment
from headrace.weight_service import LEASE_S, Lease
from services.trainer.difference import difference
from services.trainer.snapshot import Snapshot, take_snapshot

__all__ = ["Snapshot", "WeightStore", "take_snapshot"]

log = logging.getLogger(__name__)

_MOST_RETIRED = 2


@dataclass(eq=False)
class _Kept:
    """A snapshot, who reads it, and what has been made of it."""

    snapshot: Snapshot
    shipment: Shipment
    leases: set[Lease] = field(default_factory=set)
    deltas: dict[int, asyncio.Future[Shipment]] = field(default_factory=dict)


class WeightStore:
    """The newest versions. For one event loop."""

    def __init__(self, *, kept_versions: int, delta_bases: int = 0, lease_s: float = LEASE_S):
        """
        Args:
            delta_bases: earlier versions that a reader can hold and get the difference from.
        """
        self._delta_bases, self._lease_s = delta_bases, lease_s
        self._most_kept = max(kept_versions, delta_bases + 1)
        self._kept: dict[int, _Kept] = {}
        self._retired: list[_Kept] = []
        self._changed = asyncio.Event()
        self._closed = False

    def publish(self, snapshot: Snapshot) -> None:
        """Makes a version available, and the oldest unavailable to new readers when there are too many."""
        assert all(version < snapshot.policy_version for version in self._kept), "versions grow"
        for kept in self._kept.values():
            kept.deltas.clear()
        self._kept[snapshot.policy_version] = _Kept(snapshot, Shipment(snapshot.manifest, snapshot.data))
        while len(self._kept) > self._most_kept:
            oldest = self._kept.pop(min(self._kept))
            if oldest.leases:
                self._retired.append(oldest)
        while len(self._retired) > _MOST_RETIRED:
            for lease in self._retired.pop(0).leases:
                lease.revoke()
        self._wake()

    def get(self, policy_version: int) -> Snapshot | None:
        """A version, while it is kept."""
        kept = self._kept.get(policy_version)
        return kept.snapshot if kept else None

    @property
    def in_memory(self) -> list[int]:
        """Every version that is kept or leased, ascending."""
        return sorted([kept.snapshot.policy_version for kept in [*self._retired, *self._kept.values()]])

    def has_delta(self, policy_version: int, base: int) -> bool:
        """Whether a reader that holds `base` can get the difference."""
        newer = [version for version in self._kept if base < version <= policy_version]
        return base in self._kept and policy_version in newer and len(newer) <= self._delta_bases

    @contextlib.asynccontextmanager
    async def lease(self, policy_version: int, base_policy_version: int | None) -> AsyncIterator[Lease | None]:
        """Keeps a version for a reader: the difference to the base where there is one, else all of it."""
        kept = self._kept.get(policy_version)
        if kept is None:
            yield None
            return
        lease = Lease(kept.shipment, self._lease_s)
        kept.leases.add(lease)
        try:
            if base_policy_version is not None and self.has_delta(policy_version, base_policy_version):
                lease.shipment = await self._delta(kept, self._kept[base_policy_version].snapshot)
            yield lease
        finally:
            kept.leases.discard(lease)
            if kept in self._retired and not kept.leases:
                self._retired.remove(kept)

    async def watch(self) -> AsyncIterator[Snapshot]:
        """The newest version at once, then each newer one until `close`; a slow caller gets only the newest."""
        seen = 0
        while not self._closed:
            changed = self._changed
            newest = max(self._kept, default=0)
            if newest > seen:
                seen = newest
                yield self._kept[newest].snapshot
            else:
                await changed.wait()

    def close(self) -> None:
        """Ends every watch."""
        self._closed = True
        self._wake()

    async def _delta(self, kept: _Kept, base: Snapshot) -> Shipment:
        """Encoded once, in a thread, for all who ask; all of the version when that fails."""
        made = kept.deltas.get(base.policy_version)
        if made is None:
            made = asyncio.ensure_future(asyncio.to_thread(difference, kept.snapshot, base))
            kept.deltas[base.policy_version] = made
        try:
            return await asyncio.shield(made)  # it is others' too
        except Exception:
            log.exception("no difference from version %d to %d", base.policy_version, kept.snapshot.policy_version)
            return kept.shipment

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
