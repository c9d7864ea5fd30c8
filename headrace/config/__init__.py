"""The run's configuration: one YAML file in, one frozen tree of values out, or every error in it at once.

Every service reads the same file and takes its part. `load` raises ConfigError with one line for each error; a line
names the key, says what is wrong and what to do. Nothing here touches the network. Each section of the file has a
module; its keys stand there in the file's order.

`extends: FILE` puts a file's sections over those of another, key by key.

A text value may hold ${NAME}: `load` puts the environment variable's value there, so that a password need not stand in
the file.
"""

from headrace.config.environment import Environment
from headrace.config.inference import Inference
from headrace.config.model import Create, Model
from headrace.config.rollout import Rollout
from headrace.config.run import Redis, Run, Telemetry, Traces
from headrace.config.run_file import Config, ConfigError, dump, load, named_run, parse
from headrace.config.security import Security, Tls
from headrace.config.trainer import (
    Advantage,
    Checkpoint,
    Critic,
    Evaluation,
    Loss,
    Mesh,
    Optimizer,
    Trainer,
    WarmStart,
)

__all__ = [
    "Advantage",
    "Checkpoint",
    "Config",
    "ConfigError",
    "Create",
    "Critic",
    "Environment",
    "Evaluation",
    "Inference",
    "Loss",
    "Mesh",
    "Model",
    "Optimizer",
    "Redis",
    "Rollout",
    "Run",
    "Security",
    "Telemetry",
    "Tls",
    "Traces",
    "Trainer",
    "WarmStart",
    "dump",
    "load",
    "named_run",
    "parse",
]
