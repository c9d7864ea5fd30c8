"""The train step: gradients of microbatches are summed, then one update is made of the sum. No I/O, no host sync.

    state = learner.initial_state(parameters)
    for each minibatch:
        sums = learner.zeros()
        for each microbatch:
            sums = learner.accumulate(state.parameters, sums, microbatch, proximal, reference)
        state, update = learner.apply(state, sums)      # consumes both arguments
        metrics = merge(metrics, sums.metrics)           # take sums.metrics before apply: it is not consumed

Sums are unreduced and float32; `apply` divides once by the number of action tokens, so the result does not depend on how
trajectories were split into microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import optax

from headrace import config
from services.trainer.model.config import DecoderConfig
from services.trainer.model.decoder import Parameters
from services.trainer.packing import Microbatch


@dataclass(frozen=True)
class TrainState:
    """What a checkpoint must hold to go on; a pytree."""

    parameters: Parameters
    optimizer: optax.OptState
    updates: jax.Array  # int32[], updates made
    skipped: jax.Array  # int32[], updates not made because the loss or gradient was not finite


@dataclass(frozen=True)
class Metrics:
    """Sums and maxima over action tokens, float32[] on the device; a pytree. `summary` makes means of them."""

    tokens: jax.Array

    def summary(self) -> dict[str, float]:
        """Means, fractions and maxima by name, for people. Waits for the device: call it once a step."""
        raise NotImplementedError


@dataclass(frozen=True)
class Sums:
    """What `accumulate` adds up; a pytree."""

    gradients: Parameters
    metrics: Metrics


@dataclass(frozen=True)
class Update:
    """What one `apply` did, on the device; a pytree."""

    gradient_norm: jax.Array  # float32[], before clipping
    learning_rate: jax.Array  # float32[]
    skipped: jax.Array  # bool[], the loss or gradient was not finite, or there was no action token


def merge(left: Metrics | None, right: Metrics) -> Metrics:
    """Metrics of both; stays on the device."""
    raise NotImplementedError


class Learner:
    """The jitted functions of one decoder on one mesh. Holds no state but compiled programs."""

    def __init__(
        self,
        decoder: DecoderConfig,
        mesh: jax.sharding.Mesh,
        *,
        optimizer: config.Optimizer,
        steps: int,
        updates_per_step: int = 1,
        loss: config.Loss,
        temperature: float = 1.0,
        compute_dtype: Literal["float32", "bfloat16"] = "float32",
        remat: bool = False,
        head_chunk_tokens: int = 2048,
    ):
        """
        Args:
            steps: steps of the run; steps * updates_per_step is what the schedule spans.
            temperature: softmax temperature that training episodes were sampled at.
            remat: computes each layer again in the backward pass instead of keeping its activations.
            head_chunk_tokens: tokens whose logits exist at once.
        """
        raise NotImplementedError

    def initial_state(self, parameters: Parameters) -> TrainState:
        """A state that has made no update. Consumes nothing: the parameters are copied."""
        raise NotImplementedError

    def zeros(self) -> Sums:
        """Sums of nothing."""
        raise NotImplementedError

    def accumulate(
        self,
        parameters: Parameters,
        sums: Sums,
        microbatch: Microbatch,
        proximal_logprobs_BT: jax.Array | None = None,
        reference_logprobs_BT: jax.Array | None = None,
    ) -> Sums:
        """Adds the policy loss's gradient over a microbatch. Consumes `sums`.

        Args:
            proximal_logprobs_BT: `logprobs` of the microbatch at the start of the step; needed by token_tis.
            reference_logprobs_BT: `logprobs` under the reference's parameters; needed when kl_coefficient > 0.
        """
        raise NotImplementedError

    def accumulate_supervised(self, parameters: Parameters, sums: Sums, microbatch: Microbatch) -> Sums:
        """Adds the gradient of the cross entropy of the action tokens. Consumes `sums`."""
        raise NotImplementedError

    def apply(self, state: TrainState, sums: Sums) -> tuple[TrainState, Update]:
        """One update from the sums, divided by their number of action tokens. Consumes `state` and sums.gradients.

        A loss or gradient that is not finite leaves parameters and optimizer as they are and is counted.
        """
        raise NotImplementedError

    def logprobs(self, parameters: Parameters, microbatch: Microbatch) -> jax.Array:
        """float32[B, T]: log-probability of each token given those before it in its segment, at the temperature.

        Meaningless at the first token of a segment and in padding; 0 at the first token of a row.
        """
        raise NotImplementedError

    @property
    def compilations(self) -> int:
        """Programs compiled so far: it stops growing once every bucket was met."""
        raise NotImplementedError
