"""Which groups the policy has learned from, and which of them Redis must keep until a checkpoint knows that.

consumed.jsonl tells the same for the whole run, a line a step, for people and for tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from services.trainer.journal import Journal


@dataclass(frozen=True)
class Consumed:
    """One group that entered a gradient."""

    entry_id: str
    task_id: str
    size_bytes: int
    # Versions that sampled its tokens.
    oldest_version: int
    newest_version: int
    # Updates between the weights of its oldest token and those that it changed.
    age_max: int


class Ledger:
    """The consumed groups of the run, as far as the surviving state goes."""

    def __init__(self, journal: Journal):
        self._journal = journal
        self._waiting: dict[str, int] = {}
        # Entries of the step in progress, and those of them that Redis has lost.
        self._taken: set[str] = set()
        self._lost: set[str] = set()

    @property
    def waiting_ids(self) -> list[str]:
        """Entries of finished steps that are still in Redis."""
        return list(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """What they occupy there."""
        return sum(self._waiting.values())

    @property
    def lost_count(self) -> int:
        """Groups of the step in progress that are no longer in Redis."""
        return len(self._lost)

    def take(self, entry_ids: Iterable[str]) -> None:
        """Notes groups that enter the step in progress."""
        self._taken.update(entry_ids)

    def learn(self, step: int, groups: Sequence[Consumed], *, policy_version: int) -> None:
        """Notes a finished step; `policy_version` is the version that it began from."""
        self._journal.append({"step": step, "policy_version": policy_version, "groups": [asdict(g) for g in groups]})
        self._waiting |= {group.entry_id: group.size_bytes for group in groups if group.entry_id not in self._lost}
        self._taken, self._lost = set(), set()

    def forget(self, entry_ids: Iterable[str]) -> None:
        """Notes that entries have left Redis."""
        for entry_id in entry_ids:
            self._waiting.pop(entry_id, None)

    def lose_all_but(self, entry_ids: Iterable[str]) -> None:
        """Notes that Redis has lost its memory and holds these entries alone."""
        kept = set(entry_ids)
        self.forget(set(self._waiting) - kept)
        self._lost = self._taken - kept
