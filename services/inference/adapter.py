"""LoRA adapters: which tensors of a version belong to one, and where they go. Pure.

A version may hold the base's tensors, an adapter's, or both; an adapter alone leaves the base as it is. Adapter tensors
have PEFT's names, "model.layers.0.self_attn.q_proj.lora_A.weight" of shape [rank, in] and "…lora_B.weight" of shape
[out, rank], with or without "base_model.model." before and ".weight" after. The engine keeps them beside the wrapped
layer as A_buffer [1, rank, in] and B_buffer [1, out, rank], and computes x W^T + scaling * (x A^T) B^T.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_PREFIX = "base_model.model."


def split(tensors: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(the base's tensors, the adapter's by the name of the engine's array)."""
    base, adapter = {}, {}
    for name, tensor in tensors.items():
        stem = name.removeprefix(_PREFIX).removesuffix(".weight")
        if stem.endswith((".lora_A", ".lora_B")):
            layer, _, part = stem.rpartition(".lora_")
            adapter[f"{layer}.{part}_buffer"] = tensor[None]
        else:
            base[name] = tensor
    return base, adapter


def is_buffer(leaf_name: str) -> bool:
    """Whether the engine's array of this name is an adapter's."""
    return leaf_name.endswith((".A_buffer", ".B_buffer"))
