"""A gateway's world for tests: a real tokenizer, a scripted engine and a scripted environment, over real HTTP and gRPC.

The model's vocabulary has 22 ids: 7 special tokens, then the words below.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from headrace import config, model_folder
from headrace.v1.trajectory_pb2 import PURPOSE_TRAINING, Task
from services.rollout.environment import Environment
from services.rollout.episode import World
from services.rollout.inference import Engines
from services.rollout.renderer import Renderer
from services.rollout.sglang import Sglang
from services.rollout.vllm import Vllm
from tests.processes import ROOT

WORDS = ["guess", "a", "number", "higher", "lower", "found", "invalid", "1", "2", "3", "4", "5", "6", "7", "8"]
VOCABULARY_SIZE = 7 + len(WORDS)
END = 1  # the id that ends an action


def settings(folder: Path, **overrides: Any) -> config.Config:
    """The config of guess_number with values replaced by dotted key, `__` for the dots."""
    tree = yaml.safe_load((ROOT / "configs" / "guess_number.yaml").read_text())
    changes = {"run.id": "run", "run.directory": str(folder), "rollout.group_size": 2, "model.create.words": WORDS}
    changes |= {key.replace("__", "."): value for key, value in overrides.items()}
    for key, value in changes.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return config.parse(tree)


def task(number: int = 0, **changes: Any) -> Task:
    values = {"task_id": f"{number:08d}", "environment": "guess_number", "split": "train", "purpose": PURPOSE_TRAINING}
    return Task(**{**values, "index": number, "seed": number, **changes})


@contextlib.asynccontextmanager
async def world(folder: Path, *, engines: Sequence[str], environment: str, **overrides: Any) -> AsyncIterator[World]:
    """What episodes use, connected to these engines and this environment."""
    run = settings(folder, environments__guess_number__address=environment, **overrides)
    folder = model_folder.ensure(run)
    renderer = Renderer.open(folder)
    client = Environment("guess_number", run.environments["guess_number"])
    async with Engines(
        engines,
        timeout_s=run.rollout.engine_timeout_s,
        attempts=run.rollout.engine_attempts,
        vocabulary_size=json.loads((folder / "config.json").read_text())["vocab_size"],
        dialect=Vllm(run.run.id) if run.inference.dialect == "vllm" else Sglang(),
    ) as routed:
        try:
            yield World(run.rollout, renderer, routed, {"guess_number": client})
        finally:
            await client.close()


async def eventually(condition: Callable[[], bool], *, timeout_s: float = 60) -> None:
    """Returns when the condition holds. Raises TimeoutError at the deadline."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is awaited belongs to another process or has no event
            await asyncio.sleep(0.005)


def waited_s(pid: int) -> float:
    """Seconds that a process's main thread was ready to run and got no processor: a busy machine's doing, not its."""
    statistics_file = Path(f"/proc/{pid}/schedstat")
    return int(statistics_file.read_text().split()[1]) / 1e9 if statistics_file.exists() else 0.0
