"""One decoder for Llama, Qwen2 and Qwen3 shapes, in Flax NNX.

Packed rows of tokens enter, hidden states leave; services/trainer/logprob.py makes log-probabilities of those. Modules
and attributes are named as in Hugging Face's checkpoints and hold their layouts: a parameter's path is its name there,
and no table of names is needed.

Shapes: B rows, T tokens of a row, S the same as keys, D hidden units, F units of the feed-forward layer, N query heads,
K key-value heads, H units of a head, V words of the vocabulary. Weights of a Linear are [out, in].
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from services.trainer import sharding
from services.trainer.model.config import DecoderConfig

# The parameters of a decoder, float32, by their Hugging Face names ("model.layers.0.self_attn.q_proj.weight"). A plain
# pytree: optimizers, checkpoints and the wire take it as it is.
Parameters = dict[str, jax.Array]


def initial_parameters(config: DecoderConfig, seed: int, mesh: Mesh) -> Parameters:
    """Draws a decoder's parameters, sharded over the mesh; the same values for any mesh.

    Matrices are normal with a standard deviation of `initializer_range`, norms are ones and biases zeros, as Hugging
    Face draws them.
    """
    shardings = {name: sharding.parameter_sharding(name, shape, mesh) for name, shape in shapes(config).items()}

    def draw(key: jax.Array) -> Parameters:
        return _by_name(nnx.state(Decoder(config, rngs=nnx.Rngs(params=key))))

    return jax.jit(draw, out_shardings=shardings)(jax.random.key(seed))


def shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, by Hugging Face name. A tied head is no parameter of its own."""
    return {name: leaf.shape for name, leaf in _by_name(nnx.state(_abstract(config))).items()}


def bind(config: DecoderConfig, parameters: Parameters) -> Decoder:
    """The decoder that computes with these parameters; call it inside a jitted function."""
    graph, state = nnx.split(_abstract(config))
    flat = nnx.to_flat_state(state)
    bound = [(path, leaf.replace(parameters[_name(path)])) for path, leaf in zip(flat.paths, flat.leaves, strict=True)]
    return nnx.merge(graph, nnx.from_flat_state(bound))


class Decoder(nnx.Module):
    """Tokens to hidden states, and the head that scores words by them."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.model = _Stack(config, rngs=rngs)
        if not config.tie_word_embeddings:
            self.lm_head = _Linear(config.vocab_size, config.hidden_size, config, rngs=rngs)

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array,
        *,
        dtype: Any = jnp.float32,
        remat: bool = False,
    ) -> jax.Array:
        """hidden_BTD in `dtype`, after the last norm.

        A token attends to itself and those before it in its own segment. Padding, segment 0, attends to padding only.
        """
        return self.model(tokens_BT, positions_BT, segment_ids_BT, dtype=dtype, remat=remat)

    @property
    def head_VD(self) -> jax.Array:
        """The matrix whose products with a hidden state are the logits."""
        tied = not hasattr(self, "lm_head")
        return self.model.embed_tokens.weight[...] if tied else self.lm_head.weight[...]


class _Stack(nnx.Module):
    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.rotation = (config.head_dim, config.rope_theta)
        self.embed_tokens = _Linear(config.vocab_size, config.hidden_size, config, rngs=rngs)
        self.layers = nnx.List([_Layer(config, rngs=rngs) for _ in range(config.num_hidden_layers)])
        self.norm = _RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array, *, dtype: Any, remat: bool
    ) -> jax.Array:
        causal_TS = jnp.tril(jnp.ones((tokens_BT.shape[1],) * 2, bool))
        mask_BTS = causal_TS & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])
        cosines_BTH, sines_BTH = _rotation(positions_BT, *self.rotation)

        def layer_output(layer: _Layer, hidden_BTD: jax.Array) -> jax.Array:
            return layer(hidden_BTD, mask_BTS, cosines_BTH, sines_BTH)

        hidden_BTD = self.embed_tokens.weight[...].astype(dtype)[tokens_BT]
        for layer in self.layers:
            hidden_BTD = (nnx.remat(layer_output) if remat else layer_output)(layer, hidden_BTD)
        return self.norm(hidden_BTD)


class _Layer(nnx.Module):
    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config, rngs=rngs)
        self.post_attention_layernorm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _FeedForward(config, rngs=rngs)

    def __call__(
        self, hidden_BTD: jax.Array, mask_BTS: jax.Array, cosines_BTH: jax.Array, sines_BTH: jax.Array
    ) -> jax.Array:
        hidden_BTD += self.self_attn(self.input_layernorm(hidden_BTD), mask_BTS, cosines_BTH, sines_BTH)
        return hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))


class _Attention(nnx.Module):
    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        bias = config.biases_attention_inputs
        self.q_proj = _Linear(queries, config.hidden_size, config, bias=bias, rngs=rngs)
        self.k_proj = _Linear(keys, config.hidden_size, config, bias=bias, rngs=rngs)
        self.v_proj = _Linear(keys, config.hidden_size, config, bias=bias, rngs=rngs)
        self.o_proj = _Linear(config.hidden_size, queries, config, rngs=rngs)
        if config.normalises_queries_and_keys:
            self.q_norm = _RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = _RMSNorm(config.head_dim, config.rms_norm_eps)

    def __call__(
        self, hidden_BTD: jax.Array, mask_BTS: jax.Array, cosines_BTH: jax.Array, sines_BTH: jax.Array
    ) -> jax.Array:
        heads = (*hidden_BTD.shape[:2], -1, self.head_dim)
        q_BTNH, k_BTKH = self.q_proj(hidden_BTD).reshape(heads), self.k_proj(hidden_BTD).reshape(heads)
        v_BTKH = self.v_proj(hidden_BTD).reshape(heads)
        if hasattr(self, "q_norm"):
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        q_BTNH, k_BTKH = _rotate(q_BTNH, cosines_BTH, sines_BTH), _rotate(k_BTKH, cosines_BTH, sines_BTH)
        mixed_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, mask=mask_BTS[:, None])
        return self.o_proj(mixed_BTNH.reshape(*hidden_BTD.shape[:2], -1))


class _FeedForward(nnx.Module):
    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.gate_proj = _Linear(config.intermediate_size, config.hidden_size, config, rngs=rngs)
        self.up_proj = _Linear(config.intermediate_size, config.hidden_size, config, rngs=rngs)
        self.down_proj = _Linear(config.hidden_size, config.intermediate_size, config, rngs=rngs)

    def __call__(self, hidden_BTD: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD))


class _Linear(nnx.Module):
    def __init__(self, outputs: int, inputs: int, config: DecoderConfig, *, bias: bool = False, rngs: nnx.Rngs):
        self.weight = nnx.Param(config.initializer_range * jax.random.normal(rngs.params(), (outputs, inputs)))
        if bias:
            self.bias = nnx.Param(jnp.zeros(outputs))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.einsum("...i,oi->...o", x, self.weight[...].astype(x.dtype))
        return y + self.bias[...].astype(x.dtype) if hasattr(self, "bias") else y


class _RMSNorm(nnx.Module):
    def __init__(self, size: int, epsilon: float):
        self.epsilon = epsilon
        self.weight = nnx.Param(jnp.ones(size))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (self.weight[...] * wide).astype(x.dtype)


def _rotation(positions_BT: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, T, H] of rotary positions; unit i turns with unit i + H/2. https://arxiv.org/abs/2104.09864"""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions_BT[:, :, None].astype(jnp.float32) * frequencies
    angles_BTH = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles_BTH), jnp.sin(angles_BTH)


def _rotate(x_BTNH: jax.Array, cosines_BTH: jax.Array, sines_BTH: jax.Array) -> jax.Array:
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return (x_BTNH * cosines_BTH[:, :, None] + turned * sines_BTH[:, :, None]).astype(x_BTNH.dtype)


def _abstract(config: DecoderConfig) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def _by_name(state: nnx.State) -> dict[str, Any]:
    flat = nnx.to_flat_state(state)
    return {_name(path): leaf.get_value() for path, leaf in zip(flat.paths, flat.leaves, strict=True)}


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
