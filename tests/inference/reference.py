"""A decoder in NumPy, float64, written for reading: what the engine's logprobs are compared with.

Each position is computed by weights of its own version, as in a request that runs across a swap of weights: its keys
and values stay what the weights of its step made them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]


def random_weights(config: Mapping[str, Any], seed: int, scale: float = 0.15) -> dict[str, np.ndarray]:
    """float32 weights with Hugging Face names for a Qwen3 or Llama config.json."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) * scale).astype(np.float32)

    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    weights = {"model.embed_tokens.weight": 5 * draw(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": 1 + draw(hidden),
            f"{name}.self_attn.q_proj.weight": draw(heads * size, hidden),
            f"{name}.self_attn.k_proj.weight": draw(groups * size, hidden),
            f"{name}.self_attn.v_proj.weight": draw(groups * size, hidden),
            f"{name}.self_attn.o_proj.weight": draw(hidden, heads * size),
            f"{name}.post_attention_layernorm.weight": 1 + draw(hidden),
            f"{name}.mlp.gate_proj.weight": draw(inner, hidden),
            f"{name}.mlp.up_proj.weight": draw(inner, hidden),
            f"{name}.mlp.down_proj.weight": draw(hidden, inner),
        }
        if config["architectures"] == ["Qwen3ForCausalLM"]:
            weights |= {
                f"{name}.self_attn.q_norm.weight": 1 + draw(size),
                f"{name}.self_attn.k_norm.weight": 1 + draw(size),
            }
    weights["model.norm.weight"] = 1 + draw(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw(config["vocab_size"], hidden)
    return weights


def logits(
    config: Mapping[str, Any], versions: Sequence[Weights], which: Sequence[int], ids: Sequence[int]
) -> np.ndarray:
    """float64[T, V]: the logits after each of T tokens; position t is computed by `versions[which[t]]`."""
    eps, size = config["rms_norm_eps"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    T = len(ids)
    tokens, version_T = np.asarray(ids), np.asarray(which)

    def linear(x: np.ndarray, name: str) -> Any:
        out = [x @ version[name].astype(np.float64).T for version in versions]
        return np.stack(out)[version_T, np.arange(T)]

    def norm(x: np.ndarray, name: str) -> Any:
        scales = np.stack([version[name].astype(np.float64) for version in versions])[version_T]
        scales = scales.reshape(T, *[1] * (x.ndim - 2), -1)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scales

    embedding = "model.embed_tokens.weight"
    x = np.stack([version[embedding].astype(np.float64) for version in versions])[version_T, tokens]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        h = norm(x, f"{name}.input_layernorm.weight")
        q = linear(h, f"{name}.self_attn.q_proj.weight").reshape(T, heads, size)
        k = linear(h, f"{name}.self_attn.k_proj.weight").reshape(T, groups, size)
        v = linear(h, f"{name}.self_attn.v_proj.weight").reshape(T, groups, size)
        if f"{name}.self_attn.q_norm.weight" in versions[0]:
            q, k = norm(q, f"{name}.self_attn.q_norm.weight"), norm(k, f"{name}.self_attn.k_norm.weight")
        q, k = _rotate(q, config["rope_theta"]), _rotate(k, config["rope_theta"])
        k, v = np.repeat(k, heads // groups, axis=1), np.repeat(v, heads // groups, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size)
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        attention = np.exp(scores - scores.max(-1, keepdims=True))
        attention /= attention.sum(-1, keepdims=True)
        x = x + linear(np.einsum("hqk,khd->qhd", attention, v).reshape(T, -1), f"{name}.self_attn.o_proj.weight")
        h = norm(x, f"{name}.post_attention_layernorm.weight")
        gate, up = linear(h, f"{name}.mlp.gate_proj.weight"), linear(h, f"{name}.mlp.up_proj.weight")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{name}.mlp.down_proj.weight")
    head = embedding if config["tie_word_embeddings"] else "lm_head.weight"
    return linear(norm(x, "model.norm.weight"), head)


def logprobs(
    config: Mapping[str, Any],
    versions: Mapping[int, Weights],
    prompt: Sequence[int],
    reply: Sequence[int],
    *,
    spans: Sequence[Sequence[int]],
    temperature: float = 1.0,
    recomputed: bool = False,
) -> np.ndarray:
    """float64[A]: log-probability of each token of a reply whose versions are `spans`.

    The step that sampled token i computed the position before it, and the first step the whole prompt; where a swap
    had everything `recomputed`, the first step of each version computed all that stands before it.
    """
    if recomputed and len(spans) > 1:
        parts, done = [], 0
        for version, length in spans:
            before, part = [*prompt, *reply[:done]], reply[done : done + length]
            parts.append(logprobs(config, versions, before, part, spans=[(version, length)], temperature=temperature))
            done += length
        return np.concatenate(parts)
    names = sorted({version for version, _ in spans})
    of_token = [names.index(version) for version, length in spans for _ in range(length)]
    which = [of_token[0]] * (len(prompt) - 1) + of_token
    found = logits(config, [versions[name] for name in names], which, [*prompt, *reply[:-1]])[len(prompt) - 1 :]
    return log_softmax(found / temperature)[np.arange(len(reply)), np.asarray(reply)]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _rotate(x: np.ndarray, theta: float) -> Any:
    """Rotary embedding of x[T, heads, D], halves paired as in Hugging Face's models."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[0])[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
