"""An engine whose versions bring adapters alone: prints what it found as JSON.

`python -m tests.inference.adapters FOLDER`, a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TQDM_DISABLE"] = "1"

import numpy as np

from headrace import weights
from headrace.errors import StartupError
from services.inference import sglang_jax
from services.inference.weights import Hold, Version
from tests import processes
from tests.inference import engine as engines
from tests.inference import reference
from tests.inference.sharded import INFERENCE, across_a_swap

os.environ["JAX_COMPILATION_CACHE_DIR"] = str(processes.ROOT / ".cache" / "jax-tests")

RANK, SCALING = 4, 0.5
LAYERS = {"self_attn": ["q_proj", "v_proj", "o_proj"], "mlp": ["down_proj"]}


def main() -> None:
    print(json.dumps(asyncio.run(tried(Path(sys.argv[1])))))


async def tried(folder: Path) -> dict[str, Any]:
    """What an engine samples and holds across a swap of its adapter."""
    layers = [layer for names in LAYERS.values() for layer in names]
    lora = {"rank": RANK, "scaling": SCALING, "layers": layers}
    settings = engines.run_file(
        folder, "127.0.0.1:1", model={"head_dim": 32}, inference={**INFERENCE, "prefix_cache": False, "lora": lora}
    )
    config = json.loads((settings.model_path / "config.json").read_text())
    base = reference.random_weights(config, seed=1)
    adapters = {version: random_adapter(config, base, version) for version in (1, 2)}
    merged = {version: merge(base, adapter) for version, adapter in adapters.items()}
    engine, _ = await sglang_jax.Engine.start(settings, died=print)
    hold = Hold()
    refused = ""
    try:
        await engine.install(Version("test", 1, "", adapters[1]), hold)
    except StartupError as error:
        refused = str(error)
    await engine.install(Version("test", 1, "", {**base, **adapters[1]}), hold)
    before = base_hashes(engine)
    programs = engine.programs
    found = await across_a_swap(engine, config, merged, Version("test", 2, "", adapters[2]))
    return {
        **found,
        "base_tensors": len(before),
        "base_unchanged": base_hashes(engine) == before,
        "refused": refused,
        "programs_built_since": engine.programs - programs,
    }


def base_hashes(engine: Any) -> list[str]:
    """Of the engine's arrays that are no adapter's: those of three dimensions are."""
    leaves = engine._scheduler.tp_worker.worker.model_runner.model_state_leaves
    return [weights.tensor_hash(weights.tensor_bytes(np.asarray(leaf))) for leaf in leaves if leaf.ndim < 3]


def random_adapter(config: dict[str, Any], base: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """float32 adapters with PEFT's names."""
    draw = np.random.default_rng(seed)
    adapter = {}
    for layer in range(config["num_hidden_layers"]):
        for block, names in LAYERS.items():
            for name in names:
                stem = f"model.layers.{layer}.{block}.{name}"
                out, width = base[f"{stem}.weight"].shape
                adapter[f"{stem}.lora_A.weight"] = draw.normal(size=(RANK, width)).astype(np.float32) * 0.3
                adapter[f"{stem}.lora_B.weight"] = draw.normal(size=(out, RANK)).astype(np.float32) * 0.3
    return adapter


def merge(base: dict[str, np.ndarray], adapter: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """W + scaling * B A."""
    merged = dict(base)
    for name, a in adapter.items():
        if name.endswith(".lora_A.weight"):
            stem = name.removesuffix(".lora_A.weight")
            merged[f"{stem}.weight"] = base[f"{stem}.weight"] + SCALING * adapter[f"{stem}.lora_B.weight"] @ a
    return merged


if __name__ == "__main__":
    main()
