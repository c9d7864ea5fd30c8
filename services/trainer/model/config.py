"""The shape of a decoder, as a Hugging Face config.json tells it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder's shape; the names are those of config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02


def read(folder: Path) -> DecoderConfig:
    """Reads `folder/config.json`.

    Raises:
        headrace.config.ConfigError: the file is missing or asks for something that the decoder does not do; one line
            for each such key.
    """
    raise NotImplementedError


def to_json(config: DecoderConfig) -> dict[str, Any]:
    """The config.json that `read` reads back to the same value."""
    raise NotImplementedError
