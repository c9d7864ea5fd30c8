"""The decoder again, in float64 NumPy and written plainly, for tests to compare with; and tiny shapes to compare on.

One sequence at a time, one head at a time: nothing is shared with services/trainer/model.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from services.trainer.model.config import DecoderConfig

QWEN3 = DecoderConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=19,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rope_theta=1_000_000.0,
    tie_word_embeddings=True,
    initializer_range=0.3,
)
QWEN2 = DecoderConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=19,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    initializer_range=0.3,
)
LLAMA = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=23,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    initializer_range=0.3,
)
# The heads of SmolLM2-135M, fewer of them, and its tied embeddings.
SMOLLM2 = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=31,
    hidden_size=192,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=64,
    rope_theta=100_000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    initializer_range=0.1,
)


def token_logprobs(
    config: DecoderConfig, tensors: Mapping[str, np.ndarray], token_ids: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """float64[T]: log-probability of each token given those before it; 0 for the first, which nothing predicts."""
    scores = logits(config, tensors, token_ids)[:-1] / temperature
    scores -= scores.max(axis=-1, keepdims=True)
    log_softmax = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    return np.concatenate([[0.0], log_softmax[np.arange(len(token_ids) - 1), token_ids[1:]]])


def logits(config: DecoderConfig, tensors: Mapping[str, np.ndarray], token_ids: np.ndarray) -> np.ndarray:
    """float64[T, V] of one sequence int[T]; tensors are by Hugging Face name."""
    weights = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    x = weights["model.embed_tokens.weight"][token_ids]
    for number in range(config.num_hidden_layers):
        layer = {
            name.removeprefix(f"model.layers.{number}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{number}.")
        }
        x = x + _attention(config, layer, _norm(x, layer["input_layernorm.weight"], config.rms_norm_eps))
        x = x + _feed_forward(layer, _norm(x, layer["post_attention_layernorm.weight"], config.rms_norm_eps))
    x = _norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return x @ head.T


def _attention(config: DecoderConfig, layer: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    length, size = len(x), config.head_dim
    queries, keys, values = (
        x @ layer[f"self_attn.{name}_proj.weight"].T + layer.get(f"self_attn.{name}_proj.bias", 0.0) for name in "qkv"
    )
    outputs = []
    for head in range(config.num_attention_heads):
        shared = head // (config.num_attention_heads // config.num_key_value_heads)
        q = queries[:, head * size : (head + 1) * size]
        k = keys[:, shared * size : (shared + 1) * size]
        v = values[:, shared * size : (shared + 1) * size]
        if "self_attn.q_norm.weight" in layer:
            q = _norm(q, layer["self_attn.q_norm.weight"], config.rms_norm_eps)
            k = _norm(k, layer["self_attn.k_norm.weight"], config.rms_norm_eps)
        q, k = _rotate(q, config.rope_theta), _rotate(k, config.rope_theta)
        mixed = np.zeros((length, size))
        for t in range(length):
            scores = q[t] @ k[: t + 1].T / np.sqrt(size)
            weights = np.exp(scores - scores.max())
            mixed[t] = weights / weights.sum() @ v[: t + 1]
        outputs.append(mixed)
    return np.concatenate(outputs, axis=1) @ layer["self_attn.o_proj.weight"].T


def _feed_forward(layer: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    gate = x @ layer["mlp.gate_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * (x @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T


def _norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return weight * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon)


def _rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Turns the pair of units (i, i + half) at place t by the angle t / theta^(2i / size)."""
    half = x.shape[1] // 2
    turned = np.empty_like(x)
    for t in range(len(x)):
        for i in range(half):
            angle = t / theta ** (2 * i / x.shape[1])
            first, second = x[t, i], x[t, i + half]
            turned[t, i] = first * np.cos(angle) - second * np.sin(angle)
            turned[t, i + half] = second * np.cos(angle) + first * np.sin(angle)
    return turned
