"""How fast the machine decodes when nothing but the model runs: one jitted loop, no scheduler, no server.

`python -m benchmarks.pure_decode MODEL_FOLDER BATCH` prints tokens a second as JSON. A Qwen3 with random weights, the
shape of the folder's config.json: prompt of 32 keys already cached, then 64 steps under `lax.scan`, each of which
attends, samples at temperature 1 and keeps the token's log-probability, as the engine does.

Shapes: B requests, L layers, S cached slots, E hidden, H query heads, G key-value heads, Q = H / G, D head size.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

PROMPT, NEW = 32, 64


def main() -> None:
    config = json.loads((Path(sys.argv[1]) / "config.json").read_text())
    print(json.dumps({"tokens_per_s": tokens_per_s(config, int(sys.argv[2]))}))


def tokens_per_s(config: dict[str, Any], batch: int) -> float:
    """Over the fastest of five runs."""
    layers, groups, size = config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]
    weights = random_weights(config)
    cache = jnp.zeros((layers, 2, batch, PROMPT + NEW, groups, size))
    run = jax.jit(lambda weights, cache, key: decode(config, weights, cache, key))
    times_s = []
    for seed in range(6):
        start_s = time.perf_counter()
        jax.block_until_ready(run(weights, cache, jax.random.key(seed)))
        times_s.append(time.perf_counter() - start_s)
    return batch * NEW / min(times_s[1:])


def decode(config: dict[str, Any], weights: dict[str, jax.Array], cache: jax.Array, key: jax.Array) -> Any:
    """(tokens [T, B], logprobs [T, B]) of NEW steps."""
    batch = cache.shape[2]

    def step(state: tuple[jax.Array, jax.Array, jax.Array], _: None) -> Any:
        cache, tokens_B, position = state
        logits_BV, cache = forward(config, weights, cache, tokens_B, position)
        sampled_B = jax.random.categorical(jax.random.fold_in(key, position), logits_BV)
        logprobs_B = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), sampled_B[:, None], 1)[:, 0]
        return (cache, sampled_B, position + 1), (sampled_B, logprobs_B)

    start = (cache, jnp.zeros(batch, jnp.int32), jnp.int32(PROMPT))
    return jax.lax.scan(step, start, None, length=NEW)[1]


def forward(
    config: dict[str, Any], weights: dict[str, jax.Array], cache: jax.Array, tokens_B: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Logits [B, V] of the next token, and the cache with this one's keys and values."""
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    seen_S = jnp.arange(cache.shape[3]) <= position
    x_BE = weights["embed"][tokens_B]
    for layer in range(config["num_hidden_layers"]):
        qkv = norm(x_BE) @ weights["qkv"][layer]
        q, k, v = jnp.split(qkv, [heads * size, (heads + groups) * size], axis=-1)
        q_BGQD = rotate(norm(q.reshape(-1, heads, size)), position).reshape(-1, groups, heads // groups, size)
        k_BGD = rotate(norm(k.reshape(-1, groups, size)), position)
        cache = cache.at[layer, 0, :, position].set(k_BGD).at[layer, 1, :, position].set(v.reshape(-1, groups, size))
        scores = jnp.einsum("bgqd,bsgd->bgqs", q_BGQD, cache[layer, 0]) * size**-0.5
        attention = jax.nn.softmax(jnp.where(seen_S, scores, -1e30), axis=-1)
        out = jnp.einsum("bgqs,bsgd->bgqd", attention, cache[layer, 1])
        x_BE = x_BE + out.reshape(-1, heads * size) @ weights["out"][layer]
        gate, up = jnp.split(norm(x_BE) @ weights["up"][layer], 2, axis=-1)
        x_BE = x_BE + (jax.nn.silu(gate) * up) @ weights["down"][layer]
    return norm(x_BE) @ weights["head"], cache


def random_weights(config: dict[str, Any]) -> dict[str, jax.Array]:
    """Weights of the config's sizes; the norms' scales, which cost nothing, are left out."""
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    shapes = {
        "embed": (config["vocab_size"], hidden),
        "head": (hidden, config["vocab_size"]),
        "qkv": (layers, hidden, (heads + 2 * groups) * size),
        "out": (layers, heads * size, hidden),
        "up": (layers, hidden, 2 * inner),
        "down": (layers, inner, hidden),
    }
    return {
        name: 0.08 * jax.random.normal(jax.random.key(seed), shape) for seed, (name, shape) in enumerate(shapes.items())
    }


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotate(x: jax.Array, position: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angle = position / 10_000.0 ** (jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


if __name__ == "__main__":
    main()
