"""The shape of a decoder, as a Hugging Face config.json tells it.

`read` takes a folder and returns a DecoderConfig, or says which keys ask for something that the decoder does not do: a
model that would be computed wrongly is refused, never approximated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import ConfigError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# Keys that change what a decoder computes, with the values that leave it as it is here.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "use_sliding_window": (False,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (),
}


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

    @property
    def normalises_queries_and_keys(self) -> bool:
        """Whether each head's queries and keys go through an RMSNorm before the rotation."""
        return self.architecture == "Qwen3ForCausalLM"

    @property
    def biases_attention_inputs(self) -> bool:
        """Whether the query, key and value projections have biases."""
        return self.architecture == "Qwen2ForCausalLM"


def read(folder: Path) -> DecoderConfig:
    """Reads `folder/config.json`.

    Raises:
        ConfigError: the file is missing or asks for something that the decoder does not do; one line for each such key.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read ({error.strerror}); give a Hugging Face folder"]) from error
    except ValueError as error:
        raise ConfigError(str(path), [f"is not JSON: {error}"]) from error
    errors = _errors(values)
    if errors:
        raise ConfigError(str(path), errors)
    heads = values["num_attention_heads"]
    return DecoderConfig(
        architecture=values["architectures"][0],
        num_key_value_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        max_position_embeddings=values.get("max_position_embeddings", 2048),
        rope_theta=float(_rope(values).get("rope_theta", values.get("rope_theta", 10_000.0))),
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        initializer_range=float(values.get("initializer_range", 0.02)),
        **{key: values[key] for key in _REQUIRED},
    )


def to_json(config: DecoderConfig) -> dict[str, Any]:
    """The config.json that `read` reads back to the same value."""
    values = {key: value for key, value in vars(config).items() if key != "architecture"}
    model_type = config.architecture.removesuffix("ForCausalLM").lower()
    return {"architectures": [config.architecture], "model_type": model_type, "hidden_act": "silu", **values}


def _errors(values: Any) -> list[str]:
    if not isinstance(values, dict):
        return ["must be an object"]
    errors = []
    architectures = values.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        errors.append(f"architectures is {architectures!r}, must name one of {', '.join(ARCHITECTURES)}")
    for key in _REQUIRED:
        if not isinstance(values.get(key), int) or values[key] < 1:
            errors.append(f"{key} is {values.get(key)!r}, must be a positive number")
    for key, accepted in _REFUSED.items():
        value = values.get(key)
        if value is not None and value not in accepted:
            errors.append(
                f"{key} is {value!r}, which is not supported" + (f"; only {accepted[0]!r}" if accepted else "")
            )
    rope_type = _rope(values).get("rope_type", _rope(values).get("type", "default"))
    if rope_type != "default":
        key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
        errors.append(f"{key} asks for {rope_type!r}, which is not supported; only 'default'")
    if "sliding_attention" in (values.get("layer_types") or []):
        errors.append("layer_types asks for sliding_attention, which is not supported; only full_attention")
    if not errors:
        heads = values["num_attention_heads"]
        if heads % (values.get("num_key_value_heads") or heads):
            errors.append("num_attention_heads must be a multiple of num_key_value_heads")
        if not values.get("head_dim") and values["hidden_size"] % heads:
            errors.append("head_dim is not given and hidden_size is no multiple of num_attention_heads")
        if (values.get("head_dim") or values["hidden_size"] // heads) % 2:
            errors.append("head_dim must be even")
    return errors


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """What newer files say in rope_parameters and older ones in rope_scaling."""
    return values.get("rope_scaling") or values.get("rope_parameters") or {}
