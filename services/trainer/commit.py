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
        self._saving: list[str] | None = None  # entries that the checkpoint in the making has learned from

    @property
    def due(self) -> bool:
        """Whether the step that has just ended is to be made durable."""
        return (
            self._status.step % self._settings.every_steps == 0
            or self._ledger.waiting_bytes > self._settings.max_unacknowledged_bytes
        )

    async def commit(self, *, reward: float = 0.0) -> None:
        """Begins to save what the last step left; `settle` lets Redis forget the groups that it came from.

        Args:
            reward: of the last step, which the best checkpoints are chosen by.
        """
        assert self._policy.between_steps, "a checkpoint in the middle of a step would forget which groups it has seen"
        await self.settle()
        learned = self._ledger.waiting_ids
        notes = Notes(
            step=self._status.step,
            cursor=self._feeder.cursor,
            positions=self._lineage.positions,
            learned_ids=learned,
            trained_groups=self._status.trained_groups,
        )
        await self._compute(self._begin_save, notes, reward)
        self._saving = learned

    async def settle(self, *, wait: bool = True) -> None:
        """Acknowledges the groups of the checkpoint that was begun, once it is durable.

        Args:
            wait: until it is; else it is looked after at the next call.
        """
        if self._saving is None or (not wait and self._checkpoints.is_saving):
            return
        await self._compute(self._checkpoints.settle)
        await self._inbox.acknowledge(self._saving)
        self._ledger.forget(self._saving)
        self._saving = None

    def _begin_save(self, notes: Notes, reward: float) -> None:
        critic = self._policy.critic
        self._checkpoints.begin_save(
            self._policy.state,
            self._policy.reference,
            notes,
            critic=critic.state if critic else None,
            reward=reward,
        )
