"""The train step: gradients of microbatches are summed, then one update is made of the sum. No I/O, no host sync.

    state = learner.initial_state(parameters)
    for each minibatch:
        sums = learner.zeros()
        for each microbatch:
            sums = learner.accumulate(state.parameters, sums, microbatch, start, reference)
        metrics = merge(metrics, sums.metrics)
        state, update = learner.apply(state, sums)

Sums are unreduced and float32; `apply` divides once by what the loss is averaged over, so the result does not depend on
how trajectories were split into microbatches. Functions that say that they consume an argument hand its buffers on: the
argument must not be used again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from headrace import config
from services.trainer import optimizer as adamw
from services.trainer import sharding
from services.trainer.logprob import token_logprobs
from services.trainer.loss import LossInputs, cross_entropy, policy_loss
from services.trainer.metrics import Metrics, merge
from services.trainer.model import decoder
from services.trainer.model.config import DecoderConfig
from services.trainer.model.decoder import Parameters
from services.trainer.packing import Microbatch

__all__ = ["Learner", "Metrics", "Sums", "TrainState", "Update", "apply_update", "merge"]

jax.tree_util.register_dataclass(Microbatch)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a checkpoint must hold to go on; a pytree."""

    parameters: Parameters
    optimizer: optax.OptState
    updates: jax.Array  # int32[], updates made
    skipped: jax.Array  # int32[], updates not made, see `Learner.apply`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """What `accumulate` adds up; a pytree."""

    gradients: Parameters
    metrics: Metrics


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Update:
    """What one `apply` did, on the device; a pytree."""

    gradient_norm: jax.Array  # float32[], before clipping
    learning_rate: jax.Array  # float32[]
    skipped: jax.Array  # bool[]


class Learner:
    """The jitted functions of one decoder on one mesh. Holds no state but compiled programs."""

    def __init__(
        self,
        decoder_config: DecoderConfig,
        mesh: Mesh,
        *,
        optimizer: config.Optimizer,
        steps: int,
        updates_per_step: int = 1,
        loss: config.Loss,
        temperature: float = 1.0,
        compute_dtype: Literal["float32", "bfloat16"] = "float32",
        remat: bool = False,
        head_chunk_logits: int = 1 << 25,
    ):
        """
        Args:
            steps: steps of the run; steps * updates_per_step is what the schedule spans.
            temperature: softmax temperature that training episodes were sampled at.
            remat: computes each layer again in the backward pass instead of keeping its activations.
            head_chunk_logits: logits, tokens times words, that exist at once; 4 bytes each.
        """
        self.loss = loss
        self._optimizer = adamw.create(optimizer, steps=steps, updates_per_step=updates_per_step)
        rate = adamw.schedule(optimizer, steps=steps, updates_per_step=updates_per_step)
        score = functools.partial(
            _score,
            decoder_config=decoder_config,
            temperature=temperature,
            dtype=jnp.dtype(compute_dtype),
            remat=remat,
            chunk_tokens=max(1, head_chunk_logits // decoder_config.vocab_size),
        )

        def policy_loss_sum(
            parameters: Parameters,
            batch: Microbatch,
            start_BT: jax.Array | None,
            reference_BT: jax.Array | None,
            progress: jax.Array,
        ) -> tuple[jax.Array, Metrics]:
            inputs = LossInputs(
                mask=jnp.asarray(batch.action_mask_BT),
                segment_ids=jnp.asarray(batch.segment_ids_BT),
                advantages=jnp.asarray(batch.advantages_BT),
                behaviour_logprobs=jnp.asarray(batch.behaviour_logprobs_BT),
                ages=jnp.asarray(batch.ages_BT),
                start_logprobs=start_BT,
                reference_logprobs=reference_BT,
                progress=progress,
            )
            return policy_loss(*score(parameters, batch), inputs, loss)

        def cross_entropy_sum(parameters: Parameters, batch: Microbatch) -> tuple[jax.Array, Metrics]:
            return cross_entropy(*score(parameters, batch), jnp.asarray(batch.action_mask_BT))

        shapes = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in decoder.shapes(decoder_config).items()
        }
        by_name = {name: sharding.parameter_sharding(name, shape.shape, mesh) for name, shape in shapes.items()}
        moments = sharding.optimizer_sharding(jax.eval_shape(self._optimizer.init, shapes), by_name, mesh)
        one, rows = sharding.replicated(mesh), sharding.batch_sharding(mesh)
        state = TrainState(parameters=by_name, optimizer=moments, updates=one, skipped=one)  # type: ignore[arg-type]
        sums = Sums(gradients=by_name, metrics=one)  # type: ignore[arg-type]

        # Parameters may be published or be a reference's while they are read here: only what is owned is donated.
        self._accumulate = jax.jit(
            functools.partial(_accumulate, policy_loss_sum),
            in_shardings=(by_name, sums, rows, rows, rows, one),
            out_shardings=sums,
            donate_argnums=1,
        )
        self._accumulate_supervised = jax.jit(
            functools.partial(_accumulate, cross_entropy_sum),
            in_shardings=(by_name, sums, rows),
            out_shardings=sums,
            donate_argnums=1,
        )
        self._logprobs = jax.jit(
            lambda parameters, batch: score(parameters, batch)[0], in_shardings=(by_name, rows), out_shardings=rows
        )
        self._apply = jax.jit(
            functools.partial(apply_update, self._optimizer, rate),
            in_shardings=(state, by_name, one),
            out_shardings=(state, one),
            donate_argnums=0,
        )
        self._zeros = jax.jit(
            lambda: Sums(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes), Metrics.zeros()), out_shardings=sums
        )
        self._initial_state = jax.jit(self._begin, in_shardings=(by_name,), out_shardings=state)

    def initial_state(self, parameters: Parameters) -> TrainState:
        """A state that has made no update. Consumes nothing: the parameters are copied."""
        return self._initial_state(parameters)

    def zeros(self) -> Sums:
        """Sums of nothing."""
        return self._zeros()

    def accumulate(
        self,
        parameters: Parameters,
        sums: Sums,
        microbatch: Microbatch,
        start_logprobs_BT: jax.Array | None = None,
        reference_logprobs_BT: jax.Array | None = None,
        *,
        progress: float = 0.0,
    ) -> Sums:
        """Adds the policy loss's gradient over a microbatch. Consumes `sums`.

        Args:
            start_logprobs_BT: `logprobs` of the microbatch at the start of the step; needed by anchor "start".
            reference_logprobs_BT: `logprobs` under the reference's parameters; needed by a divergence in the loss.
            progress: share of the step's updates that are made, 0 to below 1; read by anchor "interpolated".
        """
        return self._accumulate(
            parameters, sums, microbatch, start_logprobs_BT, reference_logprobs_BT, jnp.float32(progress)
        )

    def accumulate_supervised(self, parameters: Parameters, sums: Sums, microbatch: Microbatch) -> Sums:
        """Adds the gradient of the cross entropy of the action tokens. Consumes `sums`."""
        return self._accumulate_supervised(parameters, sums, microbatch)

    def apply(self, state: TrainState, sums: Sums) -> tuple[TrainState, Update]:
        """One update from the sums, divided by their denominator. Consumes `state`.

        No action token, or a loss or gradient that is not finite, leaves parameters, optimizer and the schedule's count
        as they are and is counted in `skipped`.
        """
        return self._apply(state, sums.gradients, sums.metrics)

    def logprobs(self, parameters: Parameters, microbatch: Microbatch) -> jax.Array:
        """float32[B, T]: log-probability of each token given those before it in its segment, at the temperature.

        Meaningless at the first token of a segment and in padding; 0 at the first token of a row.
        """
        return self._logprobs(parameters, microbatch)

    @property
    def compilations(self) -> int:
        """Programs compiled for microbatches so far: it stops growing once every bucket was met."""
        programs = (self._accumulate, self._accumulate_supervised, self._logprobs)
        return sum(f._cache_size() for f in programs)  # type: ignore[attr-defined]

    def _begin(self, parameters: Parameters) -> TrainState:
        copied = jax.tree.map(jnp.copy, parameters)
        zero = jnp.zeros((), jnp.int32)
        return TrainState(copied, self._optimizer.init(copied), updates=zero, skipped=zero)


def _score(
    parameters: Parameters,
    batch: Microbatch,
    *,
    decoder_config: DecoderConfig,
    temperature: float,
    dtype: jnp.dtype,
    remat: bool,
    chunk_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """(logprobs_BT, entropies_BT) of a microbatch."""
    model = decoder.bind(decoder_config, parameters)
    tokens_BT, positions_BT, segment_ids_BT = map(
        jnp.asarray, (batch.tokens_BT, batch.positions_BT, batch.segment_ids_BT)
    )
    hidden_BTD = model(tokens_BT, positions_BT, segment_ids_BT, dtype=dtype, remat=remat)
    return token_logprobs(hidden_BTD, model.head_VD, tokens_BT, temperature=temperature, chunk_tokens=chunk_tokens)


def _accumulate(
    loss_sum: Callable[..., tuple[jax.Array, Metrics]], parameters: Parameters, sums: Sums, *inputs: object
) -> Sums:
    gradients, measured = jax.grad(loss_sum, has_aux=True)(parameters, *inputs)
    return Sums(jax.tree.map(jnp.add, sums.gradients, gradients), merge(sums.metrics, measured))


def apply_update(
    optimizer: optax.GradientTransformation,
    rate: adamw.Schedule,
    state: TrainState,
    gradient_sums: Parameters,
    measured: Metrics,
) -> tuple[TrainState, Update]:
    """The state after one update from gradient sums; see `Learner.apply`. For a jitted function."""
    gradients = jax.tree.map(lambda total: total / jnp.maximum(measured.denominator, 1), gradient_sums)
    norm = optax.global_norm(gradients)
    usable = jnp.isfinite(norm) & jnp.isfinite(measured.loss) & (measured.denominator > 0)
    changes, moments = optimizer.update(gradients, state.optimizer, state.parameters)
    changed = optax.apply_updates(state.parameters, changes)
    keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(usable, new, old))
    after = TrainState(
        parameters=keep(changed, state.parameters),
        optimizer=keep(moments, state.optimizer),
        updates=state.updates + usable,
        skipped=state.skipped + ~usable,
    )
    return after, Update(gradient_norm=norm, learning_rate=rate(state.updates), skipped=~usable)
