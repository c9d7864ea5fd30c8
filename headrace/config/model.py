"""Section `model`: the policy that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from headrace.config.section import Count, Section


class Create(Section):
    """A model made from nothing: its shape (names as in a Hugging Face config.json) and a word-level vocabulary."""

    architecture: Literal["Qwen3ForCausalLM", "LlamaForCausalLM"] = "Qwen3ForCausalLM"
    hidden_size: Count = 64
    intermediate_size: Count = 128
    num_hidden_layers: Count = 2
    num_attention_heads: Count = 4
    num_key_value_heads: Count = 2
    head_dim: Count = 16
    max_position_embeddings: Count = 256
    rope_theta: float = Field(10_000.0, gt=0)
    rms_norm_eps: float = Field(1e-6, gt=0)
    tie_word_embeddings: bool = True
    initializer_range: float = Field(0.02, gt=0, description="standard deviation of the initial weights")
    words: list[str] = Field(description="the vocabulary besides the special tokens; text is split at white space")
    characters: bool = Field(False, description="split text into single characters instead of words")

    @model_validator(mode="after")
    def _heads(self) -> Create:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        return self


class Model(Section):
    """The policy: a Hugging Face folder, or a small model made from nothing."""

    path: Path | None = Field(None, description="Hugging Face folder: config.json, tokenizer.json, *.safetensors")
    create: Create | None = Field(None, description="makes the model instead of reading one")

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.path is None) == (self.create is None):
            raise ValueError("set exactly one of `path` (an existing folder) and `create` (a model from nothing)")
        return self
