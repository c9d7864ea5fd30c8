"""Reads and checks a run file as a whole."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, model_validator

from headrace.config.environment import Environment
from headrace.config.inference import Inference
from headrace.config.model import Model
from headrace.config.rollout import Rollout
from headrace.config.run import Redis, Run, Telemetry
from headrace.config.section import Section
from headrace.config.security import Security
from headrace.config.trainer import Trainer
from headrace.errors import StartupError


class ConfigError(StartupError, ValueError):
    """What a user got wrong in a run file; `errors` holds one line for each key."""

    def __init__(self, source: str, errors: list[str]):
        self.errors = errors
        super().__init__("\n".join(f"{source}: {error}" for error in errors))


class Config(Section):
    """One run."""

    run: Run = Run()
    model: Model
    trainer: Trainer
    rollout: Rollout
    inference: Inference = Inference()
    environments: dict[str, Environment] = Field(min_length=1)
    redis: Redis = Redis()
    telemetry: Telemetry = Telemetry()
    security: Security = Security()

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
        if self.inference.data_parallel > 1 and self.inference.device != "tpu":
            errors.append(
                "inference.data_parallel must be 1 unless inference.device is tpu: elsewhere it samples wrongly"
            )
        if self.model.create and self.model.create.max_position_embeddings < self.inference.context_length:
            errors.append("model.create.max_position_embeddings must be at least inference.context_length")
        if self.trainer.advantage.overlong_buffer > self.rollout.max_episode_tokens:
            errors.append("trainer.advantage.overlong_buffer must be at most rollout.max_episode_tokens")
        for name in self.trainer.evaluation.environments if self.trainer.evaluation else ():
            if name not in self.environments:
                errors.append(f"trainer.evaluation.environments: {name!r} must be one of {sorted(self.environments)}")
        warm_start = self.trainer.warm_start
        if warm_start and warm_start.environment not in self.environments:
            errors.append(
                f"trainer.warm_start.environment {warm_start.environment!r} must be one of {sorted(self.environments)}"
            )
        elif warm_start and self.environments[warm_start.environment].driver == "external":
            errors.append("trainer.warm_start.environment must not be one whose driver is external: it has no expert")
        errors += self._tokens_in_the_clear()
        if errors:
            raise ValueError("\n".join(errors))
        return self

    def _tokens_in_the_clear(self) -> list[str]:
        tls = self.security.tls is not None
        errors = []
        if self.security.token_file and not tls:
            errors.append("security.token_file needs security.tls: a token that is sent in plaintext is no secret")
        for name, environment in self.environments.items():
            speaks = tls if environment.tls is None else environment.tls
            if environment.token_file and not speaks:
                errors.append(f"environments.{name}.token_file needs TLS: set security.tls, or environments.{name}.tls")
            if environment.tls and not environment.address and not tls:
                errors.append(
                    f"environments.{name}.tls is set, but we serve it without a certificate: set security.tls"
                )
        return errors

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
    tree = _read(path, ())
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


def _read(path: Path, extending: tuple[Path, ...]) -> dict[str, Any]:
    """The file's sections over those of the file that it extends. `extending` are the files that asked for it."""
    try:
        text = path.read_text()
    except OSError as error:
        asked = f"{extending[-1]}: extends {path}, which" if extending else str(path)
        raise ConfigError(asked, [f"cannot be read ({error.strerror}); give the path of a run file"]) from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(str(path), [f"is not YAML: {' '.join(str(error).split())}"]) from error
    if not isinstance(tree, dict):
        raise ConfigError(str(path), ["must hold sections (run, model, trainer, …) at its top level"])
    base = tree.pop("extends", None)
    if base is None:
        return tree
    here = path.resolve()
    if not isinstance(base, str) or here in extending:
        raise ConfigError(str(path), ["extends: must name another run file, by its path from this one's folder"])
    return _merged(_read(path.parent / base, (*extending, here)), tree)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both trees; where both have a value that is no section, the one above."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


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
