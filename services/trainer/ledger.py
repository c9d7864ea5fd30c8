"""Which groups the policy has learned from, and which of them a restart would still have to learn from again.

A group is open from its first microbatch until its step ends; then it is learned, and waits in Redis until a checkpoint
that knows it is durable. consumed.jsonl tells the same for the whole run, a line a step, for people and for tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.trainer.journal import Journal


@dataclass(frozen=True)
class Consumed:
    """One group that entered a gradient."""

    entry_id: str
    task_id: str
    size_bytes: int
    oldest_version: int
    newest_version: int


class Ledger:
    """The consumed groups of the process's current lineage."""

    def __init__(self, journal: Journal):
        self._journal = journal
        self._open: list[Consumed] = []
        self._learned: list[Consumed] = []

    @property
    def learned_ids(self) -> list[str]:
        """Entries of finished steps that are still in Redis."""
        return [group.entry_id for group in self._learned]

    @property
    def learned_bytes(self) -> int:
        """What they occupy there."""
        return sum(group.size_bytes for group in self._learned)

    def consume(self, groups: Iterable[Consumed]) -> None:
        """Notes groups of the step in progress."""
        self._open += groups

    def close_step(self, step: int, *, policy_version: int, age_max: int) -> None:
        """Ends the step that these groups were for; `policy_version` is the version that they changed."""
        self._journal.append(
            {
                "step": step,
                "policy_version": policy_version,
                "age_max": age_max,
                "groups": [
                    {
                        "entry_id": group.entry_id,
                        "task_id": group.task_id,
                        "oldest_version": group.oldest_version,
                        "newest_version": group.newest_version,
                    }
                    for group in self._open
                ],
            }
        )
        self._learned += self._open
        self._open = []

    def forget(self, entry_ids: Iterable[str]) -> None:
        """Notes that entries have left Redis."""
        gone = set(entry_ids)
        self._learned = [group for group in self._learned if group.entry_id not in gone]
