"""One decoder for Llama, Qwen2 and Qwen3 shapes."""

from __future__ import annotations

import jax

from services.trainer.model.config import DecoderConfig

# The parameters of a decoder, float32, by their Hugging Face names and in their layouts ("model.layers.0.self_attn.
# q_proj.weight" is [out, in]). A plain pytree: optimizers, checkpoints and the wire take it as it is.
Parameters = dict[str, jax.Array]


def initial_parameters(config: DecoderConfig, seed: int, mesh: jax.sharding.Mesh) -> Parameters:
    """Draws a decoder's parameters, sharded over the mesh; the same values for any mesh."""
    raise NotImplementedError
