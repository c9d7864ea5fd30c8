"""Engines over 2, 4 and 8 devices in one process, each with a swap while it generates; prints what it found as JSON.

`python -m tests.inference.sharded FOLDER [COUNT…]`, a process of its own: forced host devices are for a whole process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TQDM_DISABLE"] = "1"

import jax
import numpy as np
from flax import nnx

from headrace import weights
from services.inference import sglang_jax
from services.inference.request import Request
from services.inference.weights import Hold, Version
from tests import processes
from tests.inference import engine as engines
from tests.inference import reference

os.environ["JAX_COMPILATION_CACHE_DIR"] = str(processes.ROOT / ".cache" / "jax-tests")

# A vocabulary, heads and widths that eight devices share evenly; four key-value heads, so that eight devices need
# copies of them.
MODEL = {
    "words": [f"w{i}" for i in range(41)],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
INFERENCE = {
    "context_length": 128,
    "kv_cache_tokens": 1024,
    "max_running_requests": 4,
    "batch_buckets": [4],
    "prefill_chunk_tokens": 64,
}


def main() -> None:
    folder, counts = Path(sys.argv[1]), [int(word) for word in sys.argv[2:]] or [2, 4, 8]
    print(json.dumps({count: asyncio.run(tried(folder, count)) for count in counts}))


async def tried(folder: Path, count: int) -> dict[str, Any]:
    """What an engine over `count` devices samples and holds."""
    folder = folder / str(count)
    folder.mkdir()
    settings = engines.run_file(folder, "127.0.0.1:1", model=MODEL, inference={**INFERENCE, "tensor_parallel": count})
    config = json.loads((settings.model_path / "config.json").read_text())
    versions = {version: reference.random_weights(config, seed=version) for version in (1, 2)}
    engine, _ = await sglang_jax.Engine.start(settings, died=print)
    await engine.install(Version("test", 1, "", versions[1]), Hold())
    found = await across_a_swap(engine, config, versions, Version("test", 2, "", versions[2]))
    return {**found, **shards(engine, config, versions[2], count)}


async def across_a_swap(
    engine: sglang_jax.Engine, config: dict[str, Any], weights_of: dict[int, Any], second: Version
) -> dict[str, Any]:
    """What four requests are answered with when a version comes while three of them run.

    Args:
        weights_of: what the reference computes with, by version.
    """
    prompts = [
        np.random.default_rng(seed).integers(4, config["vocab_size"], 5 + 7 * seed).tolist() for seed in range(4)
    ]
    # The first is short: when it has ended, the others run.
    futures = [
        engine.submit(Request(None, prompt, new, 1.0, [], True, None, None, None))[1]
        for prompt, new in zip(prompts, (10, 80, 80, 80), strict=True)
    ]
    await futures[0]
    await engine.install(second, Hold())
    replies = [await future for future in futures]
    errors = [
        np.abs(
            reference.logprobs(config, weights_of, prompt, reply.token_ids, spans=reply.spans)
            - np.array(reply.logprobs)
        ).max()
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    return {"largest_error": float(max(errors)), "spans": [reply.spans for reply in replies]}


def shards(engine: Any, config: dict[str, Any], published: dict[str, np.ndarray], count: int) -> dict[str, Any]:
    """Shards whose hash is that of the published tensor's slice, all shards, and tensors that lie in parts."""
    runner = engine._scheduler.tp_worker.worker.model_runner
    paths = jax.tree_util.tree_flatten_with_path(nnx.split(runner.model)[1])[0]
    right, total, parted = 0, 0, 0
    for (path, _), leaf in zip(paths, runner.model_state_leaves, strict=True):
        expected = as_held(name_of(path), published, config, count)
        assert expected.shape == leaf.shape, (name_of(path), expected.shape, leaf.shape)
        parted += len({str(shard.index) for shard in leaf.addressable_shards}) == count
        for shard in leaf.addressable_shards:
            total += 1
            part = np.ascontiguousarray(expected[shard.index])
            right += weights.tensor_hash(weights.tensor_bytes(np.asarray(shard.data))) == weights.tensor_hash(
                weights.tensor_bytes(part)
            )
    return {"right": right, "shards": total, "parted": parted, "tensors": len(paths)}


def name_of(path: tuple[Any, ...]) -> str:
    """The Hugging Face name of a leaf."""
    words = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path]
    return ".".join("weight" if word in ("scale", "embedding") else word for word in words if word != "value")


def as_held(name: str, published: dict[str, np.ndarray], config: dict[str, Any], count: int) -> np.ndarray:
    """The whole tensor in the engine's layout: [in, out], key-value heads copied until each device has one."""
    tensor = published[name]
    copies = max(1, count // config["num_key_value_heads"])
    if copies > 1 and ("k_proj" in name or "v_proj" in name):
        heads = tensor.reshape(config["num_key_value_heads"], config["head_dim"], -1)
        tensor = np.repeat(heads, copies, axis=0).reshape(-1, tensor.shape[1])
    return tensor.T if "proj" in name else tensor


if __name__ == "__main__":
    main()
