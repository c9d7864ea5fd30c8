"""Section `trainer`: the learner."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from headrace.config.section import Address, Count, Fraction, Seconds, Section


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


class Advantage(Section):
    """What rewards are compared with; formulas are in services/trainer/advantage.py."""

    estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"] = Field(
        "grpo", description="gae trains a critic, see trainer.critic; reinforce_pp and gae normalise over the minibatch"
    )
    credit: Literal["outcome", "turns"] = Field(
        "outcome",
        description="outcome: one number for a whole trajectory; turns: each action by the rewards of its own and later"
        " turns",
    )
    discount: float = Field(1.0, gt=0, le=1, description="of a reward, for each turn that lies before it")
    gae_lambda: Fraction = Field(0.95, description="1 trusts the rewards alone, 0 the critic")
    overlong_buffer: int = Field(
        0,
        ge=0,
        description="tokens below rollout.max_episode_tokens over which a long episode's reward falls; 0: never",
    )
    overlong_penalty: float = Field(1.0, ge=0, description="what the longest episode loses")

    @model_validator(mode="after")
    def _has_turns(self) -> Advantage:
        if self.credit == "turns" and self.estimator not in ("grpo", "dr_grpo", "gae"):
            raise ValueError(f"credit: turns is not defined for {self.estimator}; use grpo, dr_grpo or gae")
        if self.credit == "outcome" and self.discount < 1 and self.estimator != "gae":
            raise ValueError("discount has no effect on credit: outcome; set credit: turns or discount: 1")
        return self


Bounds = tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]]


class Loss(Section):
    """The policy loss; formulas are in services/trainer/{loss,objective,correction,divergence}.py."""

    objective: Literal["ppo", "gspo", "cispo"] = "ppo"
    clip_low: float = Field(0.2, gt=0, lt=1, description="lower clip of the ratio is 1 - clip_low")
    clip_high: float = Field(0.28, gt=0, description="upper clip of the ratio is 1 + clip_high")
    dual_clip: float | None = Field(
        None, gt=1, description="most that a token of negative advantage weighs, in multiples of it; ppo only"
    )
    anchor: Literal["sampler", "start", "interpolated"] = Field(
        "sampler",
        description="what the ratio is measured from: the sampler's logprobs; the trainer's own at the start of the"
        " step, which costs a forward pass; or an estimate of those from both ages",
    )
    correction: Literal["none", "token_tis", "sequence_tis", "icepop"] = Field(
        "none", description="weight of a token by how the anchor differs from the sampler; needs another anchor than it"
    )
    correction_cap: float = Field(2.0, gt=0, description="cap of a token_tis or sequence_tis weight")
    icepop_bounds: Bounds = Field((0.5, 5.0), description="importance weights outside of them become 0")
    geometric_bounds: Bounds | None = Field(
        None, description="a trajectory whose mean importance weight (geometric) is outside has no gradient"
    )
    veto_bounds: Bounds | None = Field(
        None, description="a trajectory with a token whose importance weight is outside has no gradient"
    )
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_constant"
    ] = Field("token_mean", description="how token losses become one; constant divides sums by aggregation_tokens")
    aggregation_tokens: Count = Field(1024, description="constant length of sequence_mean_constant")
    kl_coefficient: float = Field(0.0, ge=0, description="weight of the divergence from the reference policy")
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_place: Literal["loss", "reward"] = "loss"
    kl_reference_steps: int = Field(
        0, ge=0, description="steps after which the reference becomes the policy of that time; 0: it stays the initial"
    )
    entropy_coefficient: float = Field(0.0, ge=0)
    truncated: Literal["keep", "mask", "penalise"] = Field(
        "keep", description="truncated trajectories: keep in the loss, leave out of it, or lower their reward"
    )
    truncation_penalty: float = Field(0.5, ge=0, description="what `penalise` takes off the reward")

    @model_validator(mode="after")
    def _is_defined(self) -> Loss:
        errors = []
        if self.kl_coefficient and self.kl_estimator == "k1" and self.kl_place == "loss":
            errors.append(
                "kl_estimator k1 in the loss has a gradient of zero in expectation, so it would do nothing; use k2 or"
                " k3, or kl_place: reward"
            )
        if self.correction != "none" and self.anchor == "sampler":
            errors.append(f"correction {self.correction} needs anchor: start or interpolated, as it weighs the anchor")
        if self.dual_clip is not None and self.objective != "ppo":
            errors.append(f"dual_clip belongs to objective ppo, not {self.objective}; remove it")
        for name in ("icepop_bounds", "geometric_bounds", "veto_bounds"):
            bounds = getattr(self, name)
            if bounds and bounds[0] >= bounds[1]:
                errors.append(f"{name} must be [low, high], low below high")
        if errors:
            raise ValueError("\n".join(errors))
        return self

    @property
    def refers(self) -> bool:
        """Whether it needs a reference policy."""
        return self.kl_coefficient > 0

    @property
    def has_divergence(self) -> bool:
        """Whether the divergence from the reference is a part of the loss itself."""
        return self.refers and self.kl_place == "loss"

    @property
    def starts(self) -> bool:
        """Whether it needs the logprobs of the policy at the start of the step."""
        return self.anchor == "start"


class Critic(Section):
    """The value model of `advantage.estimator: gae`: a decoder of the policy's shape with one output."""

    optimizer: Optimizer
    value_clip: float = Field(0.2, gt=0, description="how far a value may move from where the step began")


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


class Evaluation(Section):
    """Held-out tasks that are sampled beside training; rollout.evaluation_temperature and group_size say how."""

    every_steps: Count = Field(20, description="steps between two evaluations; the first is of the initial policy")
    tasks: Count = Field(32, description="tasks of each environment; the same ones every time")
    split: str = "test"
    environments: list[str] = Field([], description="which environments; empty: all of the run's")
    success_reward: float = Field(1.0, description="least reward of a success, for pass@k")
    final_timeout_s: Seconds = Field(120.0, description="how long the end of the run waits for the last evaluation")


class Checkpoint(Section):
    """When the run's state becomes durable."""

    every_steps: Count = 20
    keep: Count = Field(2, description="newest checkpoints that stay")
    keep_best: int = Field(0, ge=0, description="checkpoints of the highest step reward that stay besides")
    max_unacknowledged_bytes: Count = Field(
        256 * 1024 * 1024,
        description="consumed groups that wait in Redis for a checkpoint; past it one is due. Keep it well below"
        " Redis's maxmemory: a Redis that is full of them takes no group more",
    )


class Mesh(Section):
    """Devices of the trainer, by axis; -1 takes what is left."""

    data: int = Field(1, ge=1, description="axis that batches are sharded over and parameters repeated along")
    fsdp: int = Field(-1, description="axis that parameters and batches are sharded over")
    tensor: int = Field(1, ge=1, description="axis that heads and hidden units are sharded over")


class Trainer(Section):
    """The learner."""

    address: Address = Field("", description="host:port at which engines reach the trainer")
    steps: Count = Field(description="optimizer batches that the run ends after")
    groups_per_step: Count
    max_staleness: int = Field(1, ge=0, description="oldest token that may be trained on, in versions")
    stale: Literal["drop", "mask"] = Field(
        "drop",
        description="what becomes of a group with a token older than max_staleness: dropped and replaced, or only its"
        " too old tokens left out of the loss",
    )
    dynamic_sampling: int = Field(
        0,
        ge=0,
        description="groups of equal rewards that a step may give back for others, in multiples of groups_per_step;"
        " past it, and with 0, they are trained on",
    )
    minibatches: Count = Field(1, description="optimizer updates made from one step's groups")
    microbatch_tokens: Count = Field(4096, description="tokens of one packed forward-backward pass, padding included")
    max_row_tokens: Count = Field(128, description="longest trajectory that can be trained on; length of a packed row")
    optimizer: Optimizer
    advantage: Advantage = Advantage()
    loss: Loss = Loss()
    critic: Critic | None = Field(None, description="the value model; for advantage.estimator gae")
    warm_start: WarmStart | None = None
    evaluation: Evaluation | None = Field(None, description="evaluation during training; empty: none")
    checkpoint: Checkpoint = Checkpoint()
    mesh: Mesh = Mesh()
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    max_skipped_updates: Count = Field(
        8, description="updates in a row without a finite loss and gradient that end the run; each leaves the policy"
    )
    kept_versions: Count = Field(2, description="published versions that stay available to pullers")
    delta_bases: int = Field(
        2,
        ge=0,
        description="earlier versions from which an engine gets the difference to a new one, each kept on the host; 0:"
        " every pull is a whole version",
    )
    stop_at_reward: float | None = Field(
        None, description="mean reward over `stop_window` steps that ends the run early"
    )
    stop_window: Count = 10

    @model_validator(mode="after")
    def _has_its_critic(self) -> Trainer:
        if (self.advantage.estimator == "gae") != (self.critic is not None):
            raise ValueError("critic and advantage.estimator: gae go together; set both or neither")
        return self

    @model_validator(mode="after")
    def _divisible(self) -> Trainer:
        if self.groups_per_step % self.minibatches:
            raise ValueError("groups_per_step must be a multiple of minibatches")
        if self.microbatch_tokens < self.max_row_tokens:
            raise ValueError("microbatch_tokens must be at least max_row_tokens")
        if self.optimizer.warmup_steps >= self.steps:
            raise ValueError("optimizer.warmup_steps must be below steps")
        return self
