"""The value model of PPO: a decoder of the policy's shape whose head has one output, with an optimizer of its own.

It begins as the policy began, but for the head, which is zero: every value is 0 until it has learned. A value belongs
to the token that it was computed before: the critic reads what the policy read when it chose that token.

Shapes: B rows, T tokens of a row, D hidden units.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from headrace import config
from services.trainer import optimizer as adamw
from services.trainer import sharding
from services.trainer.advantage import generalised_advantages, normalise
from services.trainer.credit import turn_ends
from services.trainer.loss import aggregation_weights
from services.trainer.metrics import Metrics
from services.trainer.model import decoder
from services.trainer.model.config import DecoderConfig
from services.trainer.model.decoder import Parameters
from services.trainer.packing import Microbatch, Sample
from services.trainer.train import Sums, TrainState, Update, apply_update, merge

HEAD = "value_head.weight"


class Critic:
    """One critic on the mesh. Every method blocks or is short; call them from the compute thread."""

    def __init__(
        self,
        decoder_config: DecoderConfig,
        mesh: Mesh,
        *,
        settings: config.Critic,
        loss: config.Loss,
        steps: int,
        updates_per_step: int,
        compute_dtype: str = "float32",
    ):
        """
        Args:
            loss: aggregates value losses as it does the policy's.
            steps: steps of the run; steps * updates_per_step is what the schedule spans.
        """
        shape_of_policy = replace(decoder_config, tie_word_embeddings=True)  # a critic scores no words
        transform = adamw.create(settings.optimizer, steps=steps, updates_per_step=updates_per_step)
        rate = adamw.schedule(settings.optimizer, steps=steps, updates_per_step=updates_per_step)
        shapes = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in decoder.shapes(shape_of_policy).items()
        }
        shapes[HEAD] = jax.ShapeDtypeStruct((1, decoder_config.hidden_size), jnp.float32)
        by_name = {name: sharding.parameter_sharding(name, shape.shape, mesh) for name, shape in shapes.items()}
        moments = sharding.optimizer_sharding(jax.eval_shape(transform.init, shapes), by_name, mesh)
        one, rows = sharding.replicated(mesh), sharding.batch_sharding(mesh)
        state = TrainState(parameters=by_name, optimizer=moments, updates=one, skipped=one)  # type: ignore[arg-type]
        sums = Sums(gradients=by_name, metrics=one)  # type: ignore[arg-type]
        values = functools.partial(_values, decoder_config=shape_of_policy, dtype=jnp.dtype(compute_dtype))

        def loss_sum(parameters: Parameters, batch: Microbatch) -> tuple[jax.Array, Metrics]:
            return value_loss_sum(values(parameters, batch), batch, loss, clip=settings.value_clip)

        def accumulate(parameters: Parameters, before: Sums, batch: Microbatch) -> Sums:
            gradients, measured = jax.grad(loss_sum, has_aux=True)(parameters, batch)
            return Sums(jax.tree.map(jnp.add, before.gradients, gradients), merge(before.metrics, measured))

        self._values = jax.jit(values, in_shardings=(by_name, rows), out_shardings=rows)
        self._accumulate = jax.jit(accumulate, in_shardings=(by_name, sums, rows), out_shardings=sums, donate_argnums=1)
        self._apply = jax.jit(
            functools.partial(apply_update, transform, rate),
            in_shardings=(state, by_name, one),
            out_shardings=(state, one),
            donate_argnums=0,
        )
        self._zeros = jax.jit(
            lambda: Sums(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes), Metrics.zeros()), out_shardings=sums
        )

        def begin(parameters: Parameters) -> TrainState:
            own = {name: jnp.copy(value) for name, value in parameters.items() if name in shapes}
            own[HEAD] = jnp.zeros(shapes[HEAD].shape)
            zero = jnp.zeros((), jnp.int32)
            return TrainState(own, transform.init(own), updates=zero, skipped=zero)

        self._begin = jax.jit(begin, out_shardings=state)
        self.state: TrainState

    def start_from(self, policy: Parameters) -> None:
        """Begins as the policy; consumes nothing."""
        self.state = self._begin(policy)
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets the step in progress; the updates that it has made stay."""
        self._sums = self._zeros()
        self._measured = Metrics.zeros()
        self._updates: list[Update] = []

    def values(self, microbatch: Microbatch) -> jax.Array:
        """float32[B, T]: the value before each token was chosen; without meaning outside actions."""
        return self._values(self.state.parameters, microbatch)

    def credited(
        self, samples: Sequence[Sample], values: Sequence[np.ndarray], settings: config.Advantage
    ) -> list[Sample]:
        """The samples of a minibatch with normalised advantages, and with what the critic is to learn from them."""
        made = [
            generalised_advantages(
                np.broadcast_to(sample.rewards, sample.action_mask.shape),
                of_sample,
                sample.action_mask,
                turn_ends(sample),
                discount=settings.discount,
                trace=settings.gae_lambda,
            )
            for sample, of_sample in zip(samples, values, strict=True)
        ]
        advantages = normalise([pair[0] for pair in made], [sample.action_mask for sample in samples])
        return [
            replace(sample, advantage=advantage, values=of_sample, returns=pair[1])
            for sample, advantage, of_sample, pair in zip(samples, advantages, values, made, strict=True)
        ]

    def accumulate(self, microbatch: Microbatch) -> None:
        """Adds the gradient of the value loss over a microbatch."""
        self._sums = self._accumulate(self.state.parameters, self._sums, microbatch)

    def update(self) -> None:
        """Makes an update of what was accumulated since the last one."""
        self._measured = merge(self._measured, self._sums.metrics)
        self.state, update = self._apply(self.state, self._sums.gradients, self._sums.metrics)
        self._sums = self._zeros()
        self._updates.append(jax.block_until_ready(update))

    def end_step(self) -> dict[str, float]:
        """What the step measured, by name; begins the next."""
        measured = {
            "value_loss": self._measured.summary()["loss"],
            "value_gradient_norm": sum(float(update.gradient_norm) for update in self._updates) / len(self._updates),
        }
        self.begin_step()
        return measured


def value_loss_sum(
    values_BT: jax.Array, batch: Microbatch, loss: config.Loss, *, clip: float
) -> tuple[jax.Array, Metrics]:
    """Sum over action tokens of a 0.5 max((v - R)^2, (v_clip - R)^2), v_clip within `clip` of the step's first value.

    a is the aggregation's weight. The clipped value loss of https://arxiv.org/abs/2005.12729, section 3
    """
    mask_BT = jnp.asarray(batch.action_mask_BT)
    values_BT = jnp.where(mask_BT, values_BT, 0)
    returns_BT, old_BT = jnp.asarray(batch.returns_BT), jnp.asarray(batch.values_BT)
    clipped_BT = old_BT + jnp.clip(values_BT - old_BT, -clip, clip)
    errors_BT, clipped_errors_BT = (values_BT - returns_BT) ** 2, (clipped_BT - returns_BT) ** 2
    shares_BT, denominator = aggregation_weights(mask_BT, jnp.asarray(batch.segment_ids_BT), loss)
    loss_BT = jnp.where(mask_BT, 0.5 * jnp.maximum(errors_BT, clipped_errors_BT) * shares_BT, 0)
    tokens = jnp.sum(mask_BT, dtype=jnp.float32)
    total = jnp.sum(loss_BT, dtype=jnp.float32)
    return total, jax.lax.stop_gradient(Metrics.zeros().replace(tokens=tokens, denominator=denominator, loss=total))


def _values(parameters: Parameters, batch: Microbatch, *, decoder_config: DecoderConfig, dtype: jnp.dtype) -> jax.Array:
    trunk = {name: value for name, value in parameters.items() if name != HEAD}
    tokens_BT, positions_BT, segment_ids_BT = map(
        jnp.asarray, (batch.tokens_BT, batch.positions_BT, batch.segment_ids_BT)
    )
    hidden_BTD = decoder.bind(decoder_config, trunk)(tokens_BT, positions_BT, segment_ids_BT, dtype=dtype)
    after_BT = jnp.einsum("btd,vd->bt", hidden_BTD.astype(jnp.float32), parameters[HEAD])
    return jnp.pad(after_BT[:, :-1], ((0, 0), (1, 0)))
