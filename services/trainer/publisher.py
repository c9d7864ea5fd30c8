"""Publishes the policy: takes a version number, copies the weights to the host, announces them.

Redis gives out the numbers. versions.jsonl keeps them too, so that a Redis that has lost its memory repeats none: an
engine that holds a version takes no other weights under its number or a lower one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from headrace.stream import Streams
from services.trainer.compute import ComputeThread
from services.trainer.insist import insist
from services.trainer.journal import Journal
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
        journal: Journal,
    ):
        """
        Args:
            announce: called after each publication, to say that the service has something to serve.
            journal: the versions that this run has taken.
        """
        self._streams, self._store, self._lineage, self._status = streams, store, lineage, status
        self._compute, self._dtype, self._announce, self._journal = compute, dtype, announce, journal
        self._taken = max((entry["policy_version"] for entry in journal.read()), default=0)

    async def publish(self, parameters: Parameters, *, updated: bool = True) -> None:
        """Publishes under a new version. `updated` is false for the same weights as the newest version's."""
        at_least = max(self._lineage.newest, self._taken) + 1
        version = await insist(lambda: self._streams.reserve_version(at_least))
        self._journal.append({"step": self._status.step, "policy_version": version})
        snapshot = await self._compute(self._copy, version, parameters)
        self._lineage.publish(version, updated=updated)
        self._status.policy_version = version
        self._store.publish(snapshot)
        await self._announce()

    def _copy(self, version: int, parameters: Parameters) -> Snapshot:
        return take_snapshot(version, to_huggingface(parameters, self._dtype))
