"""Issues tickets: the run's flow control.

Outstanding is every ticket that waits or is claimed, every group that waits to be consumed, and every group of the step
in progress. With at most (max_staleness + 1) * groups_per_step of them, a ticket that is issued now is consumed at most
max_staleness versions later, whatever number of gateways work: that many steps use up all that were issued before it.

What is outstanding is counted in Redis each time, never remembered: a crash between two calls can leak no ticket. A
Redis that comes back without its memory is noticed by its cursor, which has fallen behind, and is told where the run
is; the tickets that it forgot are issued again under new numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from headrace.errors import StartupError
from headrace.stream import CursorMoved, Streams
from headrace.v1.trajectory_pb2 import PURPOSE_TRAINING, Task
from services.trainer.insist import insist
from services.trainer.ledger import Ledger
from services.trainer.lineage import Lineage
from services.trainer.status import Status
from services.trainer.task_order import TaskOrder, task_id

log = logging.getLogger(__name__)


class Feeder:
    """Owns the cursor: the number of the next ticket."""

    def __init__(
        self,
        streams: Streams,
        order: TaskOrder,
        ledger: Ledger,
        lineage: Lineage,
        status: Status,
        *,
        groups_per_step: int,
        max_staleness: int,
    ):
        self._streams, self._order, self._ledger, self._lineage = streams, order, ledger, lineage
        self._status, self._groups_per_step, self._max_staleness = status, groups_per_step, max_staleness
        self.cursor = 0
        # Tickets of evaluations that are out: no part of what training waits for.
        self.evaluating: set[str] = set()

    async def open(self, at_least: int) -> None:
        """Takes the cursor up where Redis or the checkpoint, whichever is further, left it."""
        await insist(lambda: self._streams.advance_cursor(at_least))
        self.cursor = await insist(self._streams.cursor)

    async def top_up(self) -> int:
        """Issues training tickets up to the limit and returns how many."""
        while True:
            missing = self._limit - await self.outstanding()
            tasks = [self._order.task(self.cursor + number) for number in range(missing)]
            if await self.issue(tasks, purpose=PURPOSE_TRAINING):
                return len(tasks)

    @property
    def _limit(self) -> int:
        """Tickets that may be outstanding; the last steps need no more than they consume."""
        steps_left = self._status.total_steps - self._status.step
        return min(self._max_staleness + 1, steps_left) * self._groups_per_step

    async def outstanding(self) -> int:
        """Training tickets without a terminal event and groups that no finished step has learned from."""
        # In this order: a ticket that ends between the two calls is counted twice, never missed.
        tickets = await insist(self._streams.ticket_count)
        groups = await insist(self._streams.group_count)
        learned = len(self._ledger.waiting_ids)
        self._status.outstanding_tickets = tickets + groups - learned + self._ledger.lost_count - len(self.evaluating)
        return self._status.outstanding_tickets

    async def issue(self, tasks: Sequence[Task], *, purpose: int, apart: bool = False) -> bool:
        """Issues tasks under the next numbers; False, and none, if Redis had lost its memory: count again.

        Args:
            apart: counts them in `evaluating`, and not in what is outstanding, until they are taken out of it.

        Raises:
            StartupError: another trainer issues tickets of this run.
        """
        if not tasks:
            return True
        for number, task in enumerate(tasks):
            task.task_id = task_id(self.cursor + number)
            task.purpose = purpose  # type: ignore[assignment]
            task.min_policy_version = self._lineage.newest
        try:
            await insist(lambda: self._streams.issue(tasks, first_sequence=self.cursor))
        except CursorMoved as error:
            if await insist(self._streams.cursor) > self.cursor:
                raise StartupError(f"run {self._status.run_id}: {error} Stop it or set another run.id.") from error
            await self._remind()
            return False
        self.cursor += len(tasks)
        if apart:
            self.evaluating.update(task.task_id for task in tasks)
        else:
            self._status.outstanding_tickets += len(tasks)
        return True

    async def _remind(self) -> None:
        """Tells a Redis without its memory where the run is, and what it forgot is waited for no longer."""
        log.warning("Redis has lost its memory; its tickets are issued again from number %d on", self.cursor)
        await insist(self._streams.open)
        await insist(lambda: self._streams.advance_cursor(self.cursor))
        self.evaluating.clear()
        self._ledger.lose_all_but(await insist(self._streams.group_ids))
