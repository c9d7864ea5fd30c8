"""The policy that is being trained: its state on the device, and the step in progress.

    begin_step ── add(groups) … update ── add(groups) … update ── end_step       one `update` a minibatch

Every method blocks until the device is done, so the time that it takes is the time that the device works. Call them
from the compute thread, one at a time.

A group's trajectories get their advantages as soon as it arrives and go to the device when they fill a microbatch. An
estimator that looks at a whole minibatch (`credit.normalises`) makes them wait for `update`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from headrace import config
from services.trainer import machine
from services.trainer.credit import Comparison, credited, normalises, penalised
from services.trainer.critic import Critic
from services.trainer.divergence import divergence
from services.trainer.model.decoder import Parameters
from services.trainer.packing import Microbatch, Sample, pack, placed
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
        advantage: config.Advantage | None = None,
        reference: Parameters | None = None,
        critic: Critic | None = None,
    ):
        """
        Args:
            buckets: numbers of rows that a microbatch may have, ascending.
            minibatches: updates of one step.
            advantage: how rewards become advantages.
            reference: parameters that the loss measures a divergence from.
            critic: the value model of estimator gae.
        """
        self.state, self.critic = state, critic
        self._learner, self._max_row_tokens, self._buckets = learner, max_row_tokens, buckets
        self._minibatches = minibatches
        self._advantage, self._loss = advantage or config.Advantage(), learner.loss
        self.reference = reference
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets the step in progress; the updates that it has made stay."""
        self._held: list[Comparison] = []
        self._pending: list[Sample] = []
        self._sums = self._learner.zeros()
        self._measured = Metrics.zeros()
        self._updates: list[Update] = []
        self._padding: list[float] = []
        self._tokens = 0  # observations too, padding not
        self._divergences: list[float] = []  # mean over each trajectory, where it is a part of the reward
        self._start = self.state.parameters
        if self._loss.starts and self._minibatches > 1:
            self._start = jax.tree.map(jnp.copy, self.state.parameters)  # the updates consume the originals
        if self.critic:
            self.critic.begin_step()

    def restart(self, state: TrainState) -> None:
        """Goes on from another state, which a reference and a critic, if there are, begin from too."""
        self.state = state
        if self.reference is not None:
            self.reference = jax.tree.map(jnp.copy, state.parameters)
        if self.critic:
            self.critic.start_from(state.parameters)
        self.begin_step()

    @property
    def between_steps(self) -> bool:
        """Whether the parameters are those that the last step left."""
        return not self._updates

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.state.parameters))

    def add(self, groups: Sequence[Comparison], watch: Stopwatch) -> None:
        """Adds groups to the minibatch; what fills a microbatch goes to the device."""
        if self._loss.refers and not self._loss.has_divergence:
            with watch.measure("compute"):
                groups = [self._with_divergence(group) for group in groups]
        if normalises(self._advantage):
            self._held += groups
        else:
            with watch.measure("packing"):
                samples = credited(groups, self._advantage)
            self._feed(samples, watch)

    def update(self, watch: Stopwatch) -> None:
        """Makes an update of what was added since the last one."""
        if self._held:
            self._feed(self._credited_together(watch), watch)
            self._held = []
        self._flush(watch)
        with watch.measure("compute"):
            self._measured = merge(self._measured, self._sums.metrics)
            self.state, update = self._learner.apply(self.state, self._sums)
            self._sums = self._learner.zeros()
            self._updates.append(jax.block_until_ready(update))
            if self.critic:
                self.critic.update()

    def end_step(self, step: int = 0) -> dict[str, float]:
        """What step number `step` measured, by name; begins the next."""
        measured = {
            **self._measured.summary(),
            "gradient_norm": _mean([float(update.gradient_norm) for update in self._updates]),
            "learning_rate": float(self._updates[-1].learning_rate),
            "skipped_updates": float(sum(bool(update.skipped) for update in self._updates)),
            "padding_fraction": _mean(self._padding),
            "trained_tokens": float(self._tokens),
            "compilations": float(self._learner.compilations),
            "device_memory_bytes": machine.device_memory_bytes(),
        }
        if self._divergences:
            measured["reference_kl"] = _mean(self._divergences)
        if self.critic:
            measured |= self.critic.end_step()
        moves = self._loss.kl_reference_steps
        if self.reference is not None and moves and step % moves == 0:
            self.reference = jax.tree.map(jnp.copy, self.state.parameters)
        self.begin_step()
        return measured

    def _feed(self, samples: Sequence[Sample], watch: Stopwatch) -> None:
        for sample in samples:
            waiting = sum(len(other.token_ids) for other in self._pending)
            if waiting + len(sample.token_ids) > self._buckets[-1] * self._max_row_tokens:
                self._flush(watch)
            self._pending.append(sample)

    def _flush(self, watch: Stopwatch) -> None:
        with watch.measure("packing"):
            microbatches = pack(self._pending, max_row_tokens=self._max_row_tokens, buckets=self._buckets)
            self._pending = []
            self._tokens += sum(microbatch.tokens for microbatch in microbatches)
            self._padding += [1 - microbatch.tokens / microbatch.tokens_BT.size for microbatch in microbatches]
        with watch.measure("compute"):
            for microbatch in microbatches:
                self._accumulate(microbatch)
            jax.block_until_ready(self._sums)

    def _accumulate(self, microbatch: Microbatch) -> None:
        start = self._learner.logprobs(self._start, microbatch) if self._loss.starts else None
        reference = self._reference_logprobs(microbatch) if self._loss.has_divergence else None
        progress = len(self._updates) / self._minibatches
        self._sums = self._learner.accumulate(
            self.state.parameters, self._sums, microbatch, start, reference, progress=progress
        )
        if self.critic:
            self.critic.accumulate(microbatch)

    def _credited_together(self, watch: Stopwatch) -> list[Sample]:
        """The held groups' samples with the advantages that a whole minibatch gives them."""
        if self.critic is None:
            with watch.measure("packing"):
                return credited(self._held, self._advantage)
        samples = [sample for group in self._held for sample in group.kept_samples]
        with watch.measure("compute"):
            values = self._by_sample(samples, self.critic.values)
        with watch.measure("packing"):
            return self.critic.credited(samples, values, self._advantage)

    def _with_divergence(self, group: Comparison) -> Comparison:
        """The group with the sampler's divergence at each token taken off the reward."""

        def estimate(microbatch: Microbatch) -> jax.Array:
            sampled_BT = jnp.asarray(microbatch.behaviour_logprobs_BT)
            return divergence(sampled_BT, self._reference_logprobs(microbatch), self._loss.kl_estimator)

        estimates = self._by_sample(group.samples, estimate)
        self._divergences += [
            float(of_sample[sample.action_mask].mean()) if sample.action_mask.any() else 0.0
            for sample, of_sample in zip(group.samples, estimates, strict=True)
        ]
        return penalised(group, estimates, coefficient=self._loss.kl_coefficient)

    def _reference_logprobs(self, microbatch: Microbatch) -> jax.Array:
        assert self.reference is not None
        return self._learner.logprobs(self.reference, microbatch)

    def _by_sample(self, samples: Sequence[Sample], score: Callable[[Microbatch], jax.Array]) -> list[np.ndarray]:
        """float32[T] for each sample: what `score` gives at its tokens."""
        scores: list[np.ndarray] = [np.empty(0, np.float32)] * len(samples)
        for microbatch, places in placed(samples, max_row_tokens=self._max_row_tokens, buckets=self._buckets):
            values_BT = np.asarray(score(microbatch))
            for number, row, start in places:
                scores[number] = values_BT[row, start : start + len(samples[number].token_ids)]
        return scores


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
