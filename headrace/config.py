"""The run's configuration: one YAML file in, one frozen tree of values out, or every error in it at once.

Every service reads the same file and takes its part. `load` raises ConfigError with one line for each error; a line
names the key, says what is wrong and what to do. Nothing here touches the network. It is one file because one reads it
to write a run file: every key, in the file's order.

A text value may hold ${NAME}: `load` puts the environment variable's value there, so that a password need not stand in
the file.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from headrace import address
from headrace.errors import StartupError


def _check_address(value: str) -> str:
    if value and "://" not in value and not value.startswith("unix:"):
        host, port = address.split(value)
        if not host or not port:
            raise ValueError(f"{value!r} names no host or no port; give both")
    return value


Address = Annotated[str, AfterValidator(_check_address)]
Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class ConfigError(StartupError, ValueError):
    """What a user got wrong in a run file; `errors` holds one line for each key."""

    def __init__(self, source: str, errors: list[str]):
        self.errors = errors
        super().__init__("\n".join(f"{source}: {error}" for error in errors))


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class Run(_Section):
    """What the run is called and where it writes."""

    id: str = Field(
        "", description="namespace in Redis and name of the run's folder; `headrace run` makes one if empty"
    )
    directory: Path = Field(Path("runs"), description="folder that holds the run's folder; a bucket must be mounted")
    seed: int = Field(0, ge=0, description="seed of initial weights, order of tasks and what environments draw")

    @field_validator("id")
    @classmethod
    def _id_is_a_name(cls, value: str) -> str:
        if value and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", value):
            raise ValueError("must be lower-case letters, digits and hyphens, at most 63 of them")
        return value

    @field_validator("directory")
    @classmethod
    def _directory_is_a_path(cls, value: Path) -> Path:
        if re.match(r"[a-z0-9]+:/", str(value)):
            raise ValueError("must be a path; mount the bucket and give the folder where it is mounted")
        return value

    @property
    def path(self) -> Path:
        """The run's own folder."""
        return self.directory / self.id


class Create(_Section):
    """A model made from nothing: its shape (names as in a Hugging Face config.json) and a word-level vocabulary."""

    architecture: Literal["Qwen3ForCausalLM", "LlamaForCausalLM"] = "Qwen3ForCausalLM"
    hidden_size: Count = 64
    intermediate_size: Count = 128
    num_hidden_layers: Count = 2
    num_attention_heads: Count = 4
    num_key_value_heads: Count = 2
    head_dim: Count = 16
    max_position_embeddings: Count = 256
    rope_theta: float = Field(10_000.0, gt=0)
    rms_norm_eps: float = Field(1e-6, gt=0)
    tie_word_embeddings: bool = True
    initializer_range: float = Field(0.02, gt=0, description="standard deviation of the initial weights")
    words: list[str] = Field(description="the vocabulary besides the special tokens; text is split at white space")
    characters: bool = Field(False, description="split text into single characters instead of words")

    @model_validator(mode="after")
    def _heads(self) -> Create:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        return self


class Model(_Section):
    """The policy: a Hugging Face folder, or a small model made from nothing."""

    path: Path | None = Field(None, description="Hugging Face folder: config.json, tokenizer.json, *.safetensors")
    create: Create | None = Field(None, description="makes the model instead of reading one")

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.path is None) == (self.create is None):
            raise ValueError("set exactly one of `path` (an existing folder) and `create` (a model from nothing)")
        return self


class Optimizer(_Section):
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


class Loss(_Section):
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


class WarmStart(_Section):
    """Supervised fine-tuning on an environment's demonstrations before RL begins."""

    environment: str
    demonstrations: Count = 300
    batch_size: Count = Field(32, description="trajectories of one update")
    learning_rate: float = Field(3e-3, gt=0)
    max_updates: Count = 300
    evaluate_every: Count = Field(20, description="updates between two evaluations by sampled episodes")
    evaluation_episodes: Count = 128
    stop_at_reward: float = Field(0.3, description="mean sampled reward that ends the warm start")


class Checkpoint(_Section):
    """When the run's state becomes durable."""

    every_steps: Count = 20
    keep: Count = 2
    max_unacknowledged_bytes: Count = Field(
        256 * 1024 * 1024,
        description="consumed groups that wait in Redis for a checkpoint; past it one is due. Keep it well below"
        " Redis's maxmemory: a Redis that is full of them takes no group more",
    )


class Mesh(_Section):
    """Devices of the trainer, by axis; -1 takes what is left."""

    fsdp: int = Field(-1, description="axis that parameters and batches are sharded over")
    tensor: int = Field(1, ge=1, description="axis that heads and hidden units are sharded over")


class Trainer(_Section):
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


class Rollout(_Section):
    """The gateways."""

    replicas: Count = Field(1, description="gateways that `headrace run` starts")
    group_size: int = Field(ge=2, description="episodes of one task whose rewards are compared; at least 2")
    max_concurrent_episodes: Count = 256
    temperature: float = Field(1.0, gt=0, description="softmax temperature of training episodes")
    evaluation_temperature: float = Field(1.0, ge=0, description="softmax temperature of evaluation, 0 is greedy")
    max_action_tokens: Count = Field(description="tokens of one action at the most")
    max_episode_tokens: Count = Field(description="tokens of a whole episode at the most, observations included")
    tool_parser: Literal["none", "hermes"] = "none"
    episode_timeout_s: Seconds = 600.0
    group_timeout_s: Seconds = Field(1800.0, description="stragglers of a group are cancelled after it")
    episode_attempts: Count = Field(3, description="environment sessions that one episode may take")
    engine_timeout_s: Seconds = Field(120.0, description="deadline of one engine call")
    engine_attempts: Count = Field(8, description="engine calls that one action may take")
    claim_timeout_s: Seconds = Field(30.0, description="silence after which another gateway takes a ticket over")
    max_unpublished_groups: Count = Field(64, description="ended groups held while Redis is away")
    drain_timeout_s: Seconds = Field(10.0, description="how long SIGTERM waits for groups to end; others take the rest")

    @model_validator(mode="after")
    def _group_fits(self) -> Rollout:
        if self.max_concurrent_episodes < self.group_size:
            raise ValueError("max_concurrent_episodes must be at least group_size, or no group could start")
        return self


class Inference(_Section):
    """The engines."""

    replicas: Count = Field(1, description="engines that `headrace run` starts")
    addresses: list[Address] = Field([], description="host:port of each engine")
    device: Literal["cpu", "tpu", "cuda"] = "cpu"
    context_length: Count = Field(256, description="tokens of one request at the most")
    max_running_requests: Count = 64
    kv_cache_tokens: Count = Field(16_384, description="capacity of the key-value cache")
    prefill_chunk_tokens: Count = 512
    batch_buckets: list[int] = Field([1, 16, 64], description="batch sizes that decoding is compiled for")
    dtype: Literal["float32", "bfloat16"] = "float32"
    prefix_cache: bool = True
    tensor_parallel: Count = 1
    page_size: Count = 1
    drain_timeout_s: Seconds = Field(8.0, description="time that running requests get to end after SIGTERM")
    seed: int = Field(0, ge=0)
    compilation_cache: Path | None = Field(None, description="folder of compiled programs, kept between starts")


class Environment(_Section):
    """One environment of the run; its key is the name that tasks carry."""

    implementation: str = Field("", alias="class", description="name in services/envs/catalog.py or module:Class")
    address: Address = Field("", description="host:port of its server; empty: `headrace run` starts one")
    options: dict[str, Any] = Field({}, description="keyword arguments of the class")
    split: str = "train"
    task_count: Count | None = Field(
        None,
        description="tasks of the split, each visited once an epoch in shuffled order; empty: drawn from run.seed",
    )
    weight: float = Field(1.0, gt=0, description="share of the run's tasks, relative to the others'")
    max_turns: Count = 8
    reset_timeout_s: Seconds = 60.0
    step_timeout_s: Seconds = 60.0
    max_concurrent_episodes: Count = Field(1024, description="episodes that one server runs at once")

    @model_validator(mode="after")
    def _reachable(self) -> Environment:
        if not self.implementation and not self.address:
            raise ValueError("set `class` (we serve it) or `address` (somebody does)")
        return self


class Redis(_Section):
    """The bus between gateways and trainer."""

    url: str = Field("", description="redis://host:port/db; empty: `headrace run` starts a server")
    timeout_s: Seconds = 10.0

    @property
    def place(self) -> str:
        """The url without user, password and options: for messages."""
        return re.sub(r"//.*@", "//", self.url.partition("?")[0])


class Telemetry(_Section):
    """Logs, metrics and the reward plot."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    tensorboard: bool = True
    plot_ceiling: float | None = Field(None, description="reward that the reward plot marks with a line")
    plot_ceiling_label: str = Field("", description="what that reward means")


class Config(_Section):
    """One run."""

    run: Run = Run()
    model: Model
    trainer: Trainer
    rollout: Rollout
    inference: Inference = Inference()
    environments: dict[str, Environment] = Field(min_length=1)
    redis: Redis = Redis()
    telemetry: Telemetry = Telemetry()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        errors = []
        if self.rollout.max_episode_tokens > self.inference.context_length - 7:
            errors.append(
                "rollout.max_episode_tokens must be at most inference.context_length - 7 (the engine keeps a reserve)"
            )
        if self.rollout.max_episode_tokens > self.trainer.max_row_tokens:
            errors.append(
                "rollout.max_episode_tokens must be at most trainer.max_row_tokens, or episodes cannot be trained"
            )
        if self.rollout.max_action_tokens >= self.rollout.max_episode_tokens:
            errors.append("rollout.max_action_tokens must be below rollout.max_episode_tokens")
        if self.inference.context_length > self.inference.kv_cache_tokens:
            errors.append("inference.kv_cache_tokens must be at least inference.context_length")
        if self.inference.batch_buckets != sorted(set(self.inference.batch_buckets)):
            errors.append("inference.batch_buckets must be different and ascending")
        elif not self.inference.batch_buckets or self.inference.batch_buckets[-1] < self.inference.max_running_requests:
            errors.append("the last of inference.batch_buckets must be at least inference.max_running_requests")
        if self.model.create and self.model.create.max_position_embeddings < self.inference.context_length:
            errors.append("model.create.max_position_embeddings must be at least inference.context_length")
        warm_start = self.trainer.warm_start
        if warm_start and warm_start.environment not in self.environments:
            errors.append(
                f"trainer.warm_start.environment {warm_start.environment!r} must be one of {sorted(self.environments)}"
            )
        if errors:
            raise ValueError("\n".join(errors))
        return self

    @property
    def model_path(self) -> Path:
        """The Hugging Face folder that every service reads."""
        return self.model.path or self.run.path / "model"


def load(
    path: Path | str, *, overrides: dict[str, Any] | None = None, variables: Mapping[str, str] = os.environ
) -> Config:
    """Reads a run file.

    Args:
        path: the YAML file.
        overrides: values that replace the file's, by dotted key ("trainer.steps").
        variables: what ${NAME} in a text value stands for.

    Raises:
        ConfigError: one line for each thing wrong with it.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read ({error.strerror}); give the path of a run file"]) from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(str(path), [f"is not YAML: {' '.join(str(error).split())}"]) from error
    if not isinstance(tree, dict):
        raise ConfigError(str(path), ["must hold sections (run, model, trainer, …) at its top level"])
    for key, value in (overrides or {}).items():
        _set(tree, key, value)
    unknown: list[str] = []
    tree = _substitute(tree, "", variables, unknown)
    if unknown:
        raise ConfigError(str(path), unknown)
    return parse(tree, source=str(path))


def parse(tree: dict[str, Any], *, source: str = "config") -> Config:
    """Checks a tree of plain values. Raises ConfigError like `load`."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(source, [line for item in error.errors() for line in _lines(item)]) from error


def dump(config: Config) -> str:
    """The file that `load` reads back to the same values."""
    return yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False)


def named_run(config: Config, stem: str) -> Config:
    """The same run with an id: the file's stem and the time, where the file gives none."""
    if config.run.id:
        return config
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40] or "run"
    run_id = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    return config.model_copy(update={"run": config.run.model_copy(update={"id": run_id})})


def _substitute(node: Any, key: str, variables: Mapping[str, str], unknown: list[str]) -> Any:
    """The tree with the values of variables. A line for each that is not set joins `unknown`."""
    if isinstance(node, dict):
        return {k: _substitute(v, f"{key}.{k}" if key else str(k), variables, unknown) for k, v in node.items()}
    if isinstance(node, list):
        return [_substitute(item, f"{key}.{index}", variables, unknown) for index, item in enumerate(node)]
    if not isinstance(node, str):
        return node

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in variables:
            unknown.append(f"{key}: the environment variable {name} is not set; set it")
        return variables.get(name, "")

    return re.sub(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", value, node)


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError("override", [f"{key}: {section} is not a section"])
    tree[last] = value


def _lines(item: Any) -> list[str]:
    key = ".".join(str(part) for part in item["loc"])
    kind, message = item["type"], item["msg"]
    if kind == "extra_forbidden":
        text = "unknown key; remove it or correct its spelling"
    elif kind == "missing":
        text = "missing; add it"
    else:
        text = message.removeprefix("Value error, ")
        if kind != "value_error":
            text = f"{text[0].lower()}{text[1:]}, but it is {item['input']!r}; correct it"
    return [f"{key}: {line}" if key else line for line in text.split("\n")]
