"""The commit rule: groups leave Redis only when a checkpoint that has learned from them is durable.

So a restart, which is given again every group that was not acknowledged, learns from each group exactly once, as far as
the state that survives is concerned. What waits in Redis is bounded: past a number of bytes a checkpoint is due.
"""

from __future__ import annotations

from headrace import config
from services.trainer.checkpoint import Checkpoints, Notes
from services.trainer.compute import ComputeThread
from services.trainer.feeder import Feeder
from services.trainer.inbox import Inbox
from services.trainer.ledger import Ledger
from services.trainer.lineage import Lineage
from services.trainer.policy import Policy
from services.trainer.status import Status


class Committer:
    """Makes steps durable."""

    def __init__(
        self,
        *,
        checkpoints: Checkpoints,
        policy: Policy,
        inbox: Inbox,
        feeder: Feeder,
        ledger: Ledger,
        lineage: Lineage,
        status: Status,
        compute: ComputeThread,
        settings: config.Checkpoint,
    ):
        self._checkpoints, self._policy, self._inbox, self._feeder = checkpoints, policy, inbox, feeder
        self._ledger, self._lineage, self._status, self._compute = ledger, lineage, status, compute
        self._settings = settings

    @property
    def due(self) -> bool:
        """Whether the step that has just ended is to be made durable."""
        return (
            self._status.step % self._settings.every_steps == 0
            or self._ledger.waiting_bytes > self._settings.max_unacknowledged_bytes
        )

    async def commit(self) -> None:
        """Saves what the last step left, then lets Redis forget the groups that it came from."""
        assert self._policy.between_steps, "a checkpoint in the middle of a step would forget which groups it has seen"
        learned = self._ledger.waiting_ids
        notes = Notes(
            step=self._status.step,
            cursor=self._feeder.cursor,
            positions=self._lineage.positions,
            learned_ids=learned,
            trained_groups=self._status.trained_groups,
        )
        await self._compute(self._save, notes)
        await self._inbox.acknowledge(learned)
        self._ledger.forget(learned)

    def _save(self, notes: Notes) -> None:
        critic = self._policy.critic
        self._checkpoints.save(
            self._policy.state, self._policy.reference, notes, critic=critic.state if critic else None
        )
