"""Ends a run that has stopped learning because its numbers are no longer numbers, and tells of jumps.

An update whose loss or gradient is not finite is skipped by the step itself and leaves the policy as it was. One may
happen; many in a row will not mend themselves.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Mapping

from headrace.errors import StartupError

log = logging.getLogger(__name__)

_REMEMBERED = 32
_SPIKE = 10.0


class Diverged(StartupError):
    """The run is not worth going on with; its last checkpoint is."""


class Guard:
    """Watches what steps measured."""

    def __init__(self, *, max_skipped_updates: int, updates_per_step: int):
        self._limit, self._updates_per_step = max_skipped_updates, updates_per_step
        self._skipped = 0
        self._norms: deque[float] = deque(maxlen=_REMEMBERED)

    def watch(self, measured: Mapping[str, float], *, step: int) -> dict[str, float]:
        """What it adds to the step's measurements: the gradient's norm in multiples of the recent steps' median.

        Raises:
            Diverged: too many updates in a row were skipped.
        """
        skipped = int(measured["skipped_updates"])
        self._skipped = self._skipped + skipped if skipped == self._updates_per_step else skipped
        if skipped:
            log.warning("step %d: %d of %d updates were skipped", step, skipped, self._updates_per_step)
        if self._skipped >= self._limit:
            raise Diverged(
                f"trainer: the last {self._skipped} updates were skipped, as loss or gradient was not finite or nothing"
                " was left in the loss; lower trainer.optimizer.learning_rate, or look at the last lines of"
                " metrics.jsonl. The run can go on from its last checkpoint"
            )
        norm = measured["gradient_norm"]
        usual = statistics.median(self._norms) if self._norms else norm
        spike = norm / usual if usual > 0 else 1.0
        if spike > _SPIKE:
            log.warning("step %d: the gradient's norm is %.3g, %.0f times that of recent steps", step, norm, spike)
        if skipped < self._updates_per_step:
            self._norms.append(norm)
        return {"gradient_norm_spike": spike}
