"""Parameters in and out of Hugging Face folders (config.json, tokenizer files, *.safetensors) and names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from services.trainer.model.config import DecoderConfig
from services.trainer.model.decoder import Parameters


def has_weights(folder: Path) -> bool:
    """Whether the folder holds *.safetensors."""
    raise NotImplementedError


def load_parameters(folder: Path, config: DecoderConfig, mesh: jax.sharding.Mesh) -> Parameters:
    """Reads every *.safetensors of the folder to float32, sharded over the mesh.

    Raises:
        headrace.config.ConfigError: a tensor is missing, unknown or of the wrong shape; one line for each.
    """
    raise NotImplementedError


def save_folder(
    folder: Path, parameters: Parameters, *, source: Path, dtype: Literal["float32", "bfloat16"] = "float32"
) -> None:
    """Writes a Hugging Face folder: the weights, and config and tokenizer files copied from the folder `source`."""
    raise NotImplementedError


def to_huggingface(
    parameters: Parameters, dtype: Literal["float32", "bfloat16"] = "float32"
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) in name order: the wire format of published weights.

    Each array is a copy on the host, one at a time: it stays what it is when `Learner.apply` consumes the parameters.
    bfloat16 arrays have ml_dtypes' dtype. A tied head is not repeated.
    """
    raise NotImplementedError


def from_huggingface(tensors: Mapping[str, np.ndarray], config: DecoderConfig, mesh: jax.sharding.Mesh) -> Parameters:
    """Parameters from arrays by Hugging Face name, copied and sharded over the mesh. Raises ConfigError as above."""
    raise NotImplementedError
