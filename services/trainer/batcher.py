"""Groups in, those that can be learned from out; what cannot be is set aside with its reason.

    inbox ──▶ malformed?  ──▶ dead-letter stream, ticket replaced
              unfit now?  ──▶ acknowledged,       ticket replaced     (too stale, too few trainable, left over)
              else        ──▶ LearnableGroup

verdict.py judges one group; Batcher waits for groups and acts on the verdict. What an evaluation asked for goes to it
and not into the loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

from headrace.stream import GroupEntry
from headrace.trajectory import RecordError
from headrace.v1 import trajectory_pb2 as pb
from services.trainer.evaluation import Evaluator
from services.trainer.feeder import Feeder
from services.trainer.inbox import Inbox
from services.trainer.lineage import Lineage
from services.trainer.patience import Patience
from services.trainer.returns import DEGENERATE, LEFT_OVER, MALFORMED, TOO_FEW_TRAINABLE, Returns
from services.trainer.stopwatch import Stopwatch
from services.trainer.verdict import LearnableGroup, Rules, Unfit, learnable, parse

log = logging.getLogger(__name__)

_BLOCK_S = 2.0


class Batcher:
    """Waits for learnable groups."""

    def __init__(
        self,
        inbox: Inbox,
        feeder: Feeder,
        lineage: Lineage,
        returns: Returns,
        rules: Rules,
        *,
        evaluator: Evaluator | None = None,
    ):
        self._inbox, self._feeder, self._lineage, self._returns, self._rules = inbox, feeder, lineage, returns, rules
        self._evaluator = evaluator
        self._patience = Patience()
        self._degenerate_returns = 0

    def begin_step(self) -> None:
        """Lets the next step give back as many degenerate groups as rules allow."""
        self._degenerate_returns = 0

    async def groups(self, count: int, watch: Stopwatch) -> AsyncIterator[list[LearnableGroup]]:
        """Yields exactly `count` groups, as they arrive, oldest first; an empty list when none came for a while."""
        while count:
            with watch.measure("waiting"):
                entries = await self._inbox.read(count, _BLOCK_S)
            with watch.measure("packing"):
                arrived, failed = await self._admit(entries)
            if arrived:
                self._patience.succeeded()
            if len(arrived) < len(entries) or not entries:
                with watch.measure("waiting"):
                    await self._patience.failed(failed)
                    # Replaces what was returned, and what a Redis without its memory lost.
                    await self._feeder.top_up()
            count -= len(arrived)
            yield arrived

    async def finish_evaluations(self, timeout_s: float) -> None:
        """Waits for the evaluations that are out, and returns whatever else comes."""
        if self._evaluator is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._evaluator.waiting:
                    for entry in await self._inbox.read(16, _BLOCK_S):
                        await self._finish(entry)
        self._evaluator.end()

    async def _finish(self, entry: GroupEntry) -> None:
        try:
            if await self._parsed(entry):
                await self._return(entry, Unfit(LEFT_OVER, "of a run that has ended"))
        except RecordError as error:
            await self._set_aside(entry, error)

    async def _admit(self, entries: Sequence[GroupEntry]) -> tuple[list[LearnableGroup], int]:
        """What can be learned from, and how many of the others had failed."""
        admitted, failed = [], 0
        for entry in entries:
            try:
                record = await self._parsed(entry)
                if record is None:
                    continue
                group = learnable(entry, record, self._rules, self._lineage)
                if group.degenerate and self._degenerate_returns < self._rules.degenerate_returns:
                    self._degenerate_returns += 1
                    raise Unfit(DEGENERATE, "all its rewards are equal")
                admitted.append(group)
            except RecordError as error:
                await self._set_aside(entry, error)
                failed += 1
            except Unfit as error:
                await self._return(entry, error)
                failed += error.reason == TOO_FEW_TRAINABLE
        return admitted, failed

    async def _parsed(self, entry: GroupEntry) -> pb.TrajectoryGroup | None:
        """The group of an entry; None where an evaluation has taken it. Raises RecordError when it cannot be true."""
        record = parse(entry, self._rules, self._lineage, cursor=self._feeder.cursor)
        if self._evaluator and self._evaluator.take(record):
            await self._inbox.acknowledge([entry.entry_id])
            return None
        return record

    async def _set_aside(self, entry: GroupEntry, error: RecordError) -> None:
        log.warning("group %s is malformed and goes to the dead-letter stream: %s", entry.entry_id, error)
        task_id = self._returns.record(entry, MALFORMED, str(error))
        if self._evaluator:
            self._evaluator.lose(task_id)
        await self._inbox.dead_letter(entry, str(error))

    async def _return(self, entry: GroupEntry, error: Unfit) -> None:
        log.info("group %s is returned (%s): %s", entry.entry_id, error.reason, error)
        self._returns.record(entry, error.reason, str(error))
        await self._inbox.acknowledge([entry.entry_id])
