"""Section `trainer`: the learner."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headrace.config.section import Address, Count, Fraction, Section


class Optimizer(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(gt=0)
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="decay over the run's updates")
    warmup_steps: int = Field(0, ge=0, description="steps over which the rate rises from 0")
    final_fraction: Fraction = Field(0.0, description="share of the rate that a decaying schedule ends at")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_gradient_norm: float = Field(1.0, gt=0)


class Loss(Section):
    """The policy loss; formulas are in services/trainer/loss.py."""

    clip_low: float = Field(0.2, gt=0, lt=1, description="lower clip of the ratio is 1 - clip_low")
    clip_high: float = Field(0.28, gt=0, description="upper clip of the ratio is 1 + clip_high")
    correction: Literal["none", "token_tis"] = Field(
        "none",
        description="none: ratio to the sampler's logprobs; token_tis: ratio to the trainer's own at the start of the"
        " step, weighted by truncated importance sampling",
    )
    tis_cap: float = Field(2.0, gt=0, description="cap of the truncated importance weight")
    kl_coefficient: float = Field(0.0, ge=0, description="weight of the k3 divergence from the initial policy")
    entropy_coefficient: float = Field(0.0, ge=0)
    truncated: Literal["keep", "mask", "penalise"] = Field(
        "keep", description="truncated trajectories: keep in the loss, leave out of it, or lower their reward"
    )
    truncation_penalty: float = Field(0.5, ge=0, description="what `penalise` takes off the reward")


class WarmStart(Section):
    """Supervised fine-tuning on an environment's demonstrations before RL begins."""

    environment: str
    demonstrations: Count = 300
    batch_size: Count = Field(32, description="trajectories of one update")
    learning_rate: float = Field(3e-3, gt=0)
    max_updates: Count = 300
    evaluate_every: Count = Field(20, description="updates between two evaluations by sampled episodes")
    evaluation_episodes: Count = 128
    stop_at_reward: float = Field(0.3, description="mean sampled reward that ends the warm start")


class Checkpoint(Section):
    """When the run's state becomes durable."""

    every_steps: Count = 20
    keep: Count = 2
    max_unacknowledged_bytes: Count = Field(
        256 * 1024 * 1024,
        description="consumed groups that wait in Redis for a checkpoint; past it one is due. Keep it well below"
        " Redis's maxmemory: a Redis that is full of them takes no group more",
    )


class Mesh(Section):
    """Devices of the trainer, by axis; -1 takes what is left."""

    fsdp: int = Field(-1, description="axis that parameters and batches are sharded over")
    tensor: int = Field(1, ge=1, description="axis that heads and hidden units are sharded over")


class Trainer(Section):
    """The learner."""

    address: Address = Field("", description="host:port at which engines reach the trainer")
    steps: Count = Field(description="optimizer batches that the run ends after")
    groups_per_step: Count
    max_staleness: int = Field(1, ge=0, description="oldest token that may be trained on, in versions")
    minibatches: Count = Field(1, description="optimizer updates made from one step's groups")
    microbatch_tokens: Count = Field(4096, description="tokens of one packed forward-backward pass, padding included")
    max_row_tokens: Count = Field(128, description="longest trajectory that can be trained on; length of a packed row")
    optimizer: Optimizer
    loss: Loss = Loss()
    warm_start: WarmStart | None = None
    checkpoint: Checkpoint = Checkpoint()
    mesh: Mesh = Mesh()
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    kept_versions: Count = Field(2, description="published versions that stay available to pullers")
    stop_at_reward: float | None = Field(
        None, description="mean reward over `stop_window` steps that ends the run early"
    )
    stop_window: Count = 10

    @model_validator(mode="after")
    def _divisible(self) -> Trainer:
        if self.groups_per_step % self.minibatches:
            raise ValueError("groups_per_step must be a multiple of minibatches")
        if self.microbatch_tokens < self.max_row_tokens:
            raise ValueError("microbatch_tokens must be at least max_row_tokens")
        if self.optimizer.warmup_steps >= self.steps:
            raise ValueError("optimizer.warmup_steps must be below steps")
        return self
    delta_bases: int = Field(
        2,
        ge=0,
        description="earlier versions from which an engine gets the difference to a new one, each kept on the host; 0:"
        " every pull is a whole version",
    )
