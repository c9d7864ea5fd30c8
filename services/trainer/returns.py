"""Groups that ended without entering a gradient: counted by environment and reason, and listed in returned.jsonl.

Each ticket number of a run is in consumed.jsonl, in returned.jsonl, used by the warm start, or still out; or it was out
when Redis lost its memory.
"""

from __future__ import annotations

from collections.abc import Collection

from google.protobuf.message import DecodeError

from headrace.stream import GroupEntry
from headrace.v1.trajectory_pb2 import Task, TrajectoryGroup
from services.trainer.journal import Journal
from services.trainer.status import Status

# Reasons.
MALFORMED = "malformed"
TOO_STALE = "too_stale"
TOO_FEW_TRAINABLE = "too_few_trainable"
LEFT_OVER = "left_over"
DEGENERATE = "degenerate"


class Returns:
    """The run's returned groups. Knows those of the processes before it."""

    def __init__(self, journal: Journal, status: Status, *, environments: Collection[str]):
        self._journal, self._status, self._environments = journal, status, environments
        self._seen: set[str] = set()
        for line in journal.read():
            self._count(line["entry_id"], line["environment"], line["reason"])

    def record(self, entry: GroupEntry, reason: str, detail: str) -> str:
        """Notes a group, before it leaves Redis: a kill in between may list it twice, but count it once.

        Returns:
            The task id that it claims, empty if none.
        """
        task = _task(entry)
        # What a malformed record claims is no name for a metric.
        environment = task.environment if task.environment in self._environments else ""
        self._journal.append(
            {
                "step": self._status.step,
                "entry_id": entry.entry_id,
                "task_id": task.task_id,
                "environment": environment,
                "reason": reason,
                "detail": detail,
            }
        )
        self._count(entry.entry_id, environment, reason)
        return task.task_id

    def _count(self, entry_id: str, environment: str, reason: str) -> None:
        if entry_id not in self._seen:
            self._seen.add(entry_id)
            self._status.returned_groups[environment, reason] += 1


def _task(entry: GroupEntry) -> Task:
    try:
        return TrajectoryGroup.FromString(entry.payload).task
    except DecodeError:
        return Task()
