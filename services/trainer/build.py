"""Builds the model and what trains it from a run's config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax

from headrace.config import Config, ConfigError
from services.trainer import sharding
from services.trainer.checkpoint import Checkpoints, Notes
from services.trainer.critic import Critic
from services.trainer.model import config as decoder_configs
from services.trainer.model import decoder, huggingface
from services.trainer.model.config import DecoderConfig
from services.trainer.packing import row_buckets
from services.trainer.policy import Policy
from services.trainer.train import Learner, TrainState


@dataclass(frozen=True)
class Model:
    """The policy, what trains it and where it is kept."""

    config: DecoderConfig
    folder: Path
    mesh: jax.sharding.Mesh
    buckets: tuple[int, ...]
    learner: Learner
    policy: Policy
    checkpoints: Checkpoints
    # Of the checkpoint that the policy was restored from.
    notes: Notes | None


def build(config: Config, folder: Path, *, step: int | None = None) -> Model:
    """The policy as its newest checkpoint, its folder or the run's seed has it. Call it in the compute thread.

    Args:
        folder: the model's Hugging Face folder.
        step: the checkpoint to take instead of the newest.

    Raises:
        ConfigError: what config and folder ask for cannot be built.
        StartupError: the checkpoint is of another model, cannot be read, or, with `step`, does not exist.
    """
    settings = config.trainer
    mesh = sharding.create_mesh(settings.mesh.fsdp, settings.mesh.tensor, data=settings.mesh.data)
    decoder_config = decoder_configs.read(folder)
    try:
        buckets = row_buckets(settings.microbatch_tokens, settings.max_row_tokens, sharding.row_shards(mesh))
    except ValueError as error:
        raise ConfigError("trainer", [str(error)]) from error
    if huggingface.has_weights(folder):
        parameters = huggingface.load_parameters(folder, decoder_config, mesh)
    else:
        parameters = decoder.initial_parameters(decoder_config, config.run.seed, mesh)
    learner = Learner(
        decoder_config,
        mesh,
        optimizer=settings.optimizer,
        steps=settings.steps,
        updates_per_step=settings.minibatches,
        loss=settings.loss,
        temperature=config.rollout.temperature,
        compute_dtype=settings.compute_dtype,
    )
    checkpoints = Checkpoints(
        config.run.path / "checkpoints", keep=settings.checkpoint.keep, keep_best=settings.checkpoint.keep_best
    )
    refers = settings.loss.refers
    fresh: TrainState = learner.initial_state(parameters)
    critic = None
    if settings.critic:
        critic = Critic(
            decoder_config,
            mesh,
            settings=settings.critic,
            loss=settings.loss,
            steps=settings.steps,
            updates_per_step=settings.minibatches,
            compute_dtype=settings.compute_dtype,
        )
        critic.start_from(parameters)
    restored = checkpoints.restore(fresh, with_reference=refers, critic=critic.state if critic else None, step=step)
    if critic and restored and restored.critic:
        critic.state = restored.critic
    policy = Policy(
        learner,
        restored.state if restored else fresh,
        max_row_tokens=settings.max_row_tokens,
        buckets=buckets,
        minibatches=settings.minibatches,
        advantage=settings.advantage,
        reference=(restored.reference if restored else parameters) if refers else None,
        critic=critic,
    )
    notes = restored.notes if restored else None
    return Model(decoder_config, folder, mesh, buckets, learner, policy, checkpoints, notes)
