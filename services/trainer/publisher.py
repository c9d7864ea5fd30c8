"""Publishes the policy: takes a version number, copies the weights to the host, announces them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from headrace.stream import Streams
from services.trainer.compute import ComputeThread
from services.trainer.insist import insist
from services.trainer.lineage import Lineage
from services.trainer.model.decoder import Parameters
from services.trainer.model.huggingface import to_huggingface
from services.trainer.status import Status
from services.trainer.weights import Snapshot, WeightStore, take_snapshot


class Publisher:
    """Gives weights a version that no weights of this run ever had."""

    def __init__(
        self,
        streams: Streams,
        store: WeightStore,
        lineage: Lineage,
        status: Status,
        compute: ComputeThread,
        *,
        dtype: Literal["float32", "bfloat16"],
        announce: Callable[[], Awaitable[None]],
        above: int = 0,
    ):
        """
        Args:
            announce: called after each publication, to say that the service has something to serve.
            above: a version that is known to be taken, should Redis have forgotten it.
        """
        self._streams, self._store, self._lineage, self._status = streams, store, lineage, status
        self._compute, self._dtype, self._announce, self._above = compute, dtype, announce, above

    async def publish(self, parameters: Parameters, *, updated: bool = True) -> None:
        """Publishes under a new version. `updated` is false for the same weights as the newest version's."""
        at_least = max(self._lineage.newest, self._above) + 1
        version = await insist(lambda: self._streams.reserve_version(at_least))
        snapshot = await self._compute(self._copy, version, parameters)
        self._lineage.publish(version, updated=updated)
        self._status.policy_version = version
        self._store.publish(snapshot)
        await self._announce()

    def _copy(self, version: int, parameters: Parameters) -> Snapshot:
        return take_snapshot(version, to_huggingface(parameters, self._dtype))
