"""The policy that is being trained: its state on the device, and the step in progress.

    begin_step ── add(samples) … update ── add(samples) … update ── end_step       one `update` a minibatch

Every method blocks until the device is done, so the time that it takes is the time that the device works. Call them
from the compute thread, one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from services.trainer.model.decoder import Parameters
from services.trainer.packing import Microbatch, Sample, pack
from services.trainer.stopwatch import Stopwatch
from services.trainer.train import Learner, Metrics, TrainState, Update, merge


class Policy:
    """One policy on the mesh."""

    def __init__(
        self,
        learner: Learner,
        state: TrainState,
        *,
        max_row_tokens: int,
        buckets: tuple[int, ...],
        minibatches: int = 1,
        proximal: bool = False,
        reference: Parameters | None = None,
    ):
        """
        Args:
            buckets: numbers of rows that a microbatch may have, ascending.
            minibatches: updates of one step.
            proximal: whether the loss needs the logprobs of the policy at the start of the step.
            reference: parameters that the loss measures a divergence from.
        """
        self.state = state
        self.reference = reference
        self._learner, self._max_row_tokens, self._buckets = learner, max_row_tokens, buckets
        self._minibatches, self._proximal = minibatches, proximal
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets the step in progress; the updates that it has made stay."""
        self._pending: list[Sample] = []
        self._sums = self._learner.zeros()
        self._measured = Metrics.zeros()
        self._updates: list[Update] = []
        self._padding: list[float] = []
        self._anchor = self.state.parameters
        if self._proximal and self._minibatches > 1:
            self._anchor = jax.tree.map(jnp.copy, self.state.parameters)  # the updates consume the originals

    def restart(self, state: TrainState) -> None:
        """Goes on from another state, which a reference, if there is one, is taken from too."""
        self.state = state
        if self.reference is not None:
            self.reference = jax.tree.map(jnp.copy, state.parameters)
        self.begin_step()

    @property
    def between_steps(self) -> bool:
        """Whether the parameters are those that the last step left."""
        return not self._updates

    def add(self, samples: Sequence[Sample], watch: Stopwatch) -> None:
        """Adds trajectories to the minibatch; what fills a microbatch goes to the device."""
        for sample in samples:
            waiting = sum(len(other.token_ids) for other in self._pending)
            if waiting + len(sample.token_ids) > self._buckets[-1] * self._max_row_tokens:
                self._flush(watch)
            self._pending.append(sample)

    def update(self, watch: Stopwatch) -> None:
        """Makes an update of what was added since the last one."""
        self._flush(watch)
        with watch.measure("compute"):
            self._measured = merge(self._measured, self._sums.metrics)
            self.state, update = self._learner.apply(self.state, self._sums)
            self._sums = self._learner.zeros()
            self._updates.append(jax.block_until_ready(update))

    def end_step(self) -> dict[str, float]:
        """What the step measured, by name; begins the next."""
        measured = {
            **self._measured.summary(),
            "gradient_norm": _mean([float(update.gradient_norm) for update in self._updates]),
            "learning_rate": float(self._updates[-1].learning_rate),
            "skipped_updates": float(sum(bool(update.skipped) for update in self._updates)),
            "padding_fraction": _mean(self._padding),
        }
        self.begin_step()
        return measured

    def _flush(self, watch: Stopwatch) -> None:
        with watch.measure("packing"):
            microbatches = pack(self._pending, max_row_tokens=self._max_row_tokens, buckets=self._buckets)
            self._pending = []
            self._padding += [1 - microbatch.tokens / microbatch.tokens_BT.size for microbatch in microbatches]
        with watch.measure("compute"):
            for microbatch in microbatches:
                self._accumulate(microbatch)
            jax.block_until_ready(self._sums)

    def _accumulate(self, microbatch: Microbatch) -> None:
        proximal = self._learner.logprobs(self._anchor, microbatch) if self._proximal else None
        reference = self._learner.logprobs(self.reference, microbatch) if self.reference is not None else None
        self._sums = self._learner.accumulate(self.state.parameters, self._sums, microbatch, proximal, reference)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
