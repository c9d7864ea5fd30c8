"""Parameters in and out of Hugging Face folders (config.json, tokenizer files, *.safetensors) and names.

A parameter has the same name and layout in memory, in a file and on the wire.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from headrace.config import ConfigError
from services.trainer import sharding
from services.trainer.model import decoder
from services.trainer.model.config import DecoderConfig
from services.trainer.model.decoder import Parameters

Dtype = Literal["float32", "bfloat16"]

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf")


def has_weights(folder: Path) -> bool:
    """Whether the folder holds *.safetensors."""
    return any(folder.glob("*.safetensors"))


def load_parameters(folder: Path, config: DecoderConfig, mesh: Mesh) -> Parameters:
    """Reads every *.safetensors of the folder to float32, sharded over the mesh; one tensor is on the host at a time.

    Raises:
        ConfigError: a tensor is missing, unknown or of the wrong shape, or a file cannot be read; one line for each.
    """
    readers: dict[str, Callable[[], np.ndarray]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            file = safe_open(path, framework="np")
        except (OSError, SafetensorError) as error:
            raise ConfigError(str(path), [f"cannot be read ({error}); copy the file again"]) from error
        readers |= {name: functools.partial(file.get_tensor, name) for name in list(file.keys())}
    return _place(readers, config, mesh, source=str(folder))


def from_huggingface(tensors: Mapping[str, np.ndarray], config: DecoderConfig, mesh: Mesh) -> Parameters:
    """Parameters from arrays by Hugging Face name, copied and sharded over the mesh. Raises ConfigError as above."""
    return _place({name: functools.partial(np.asarray, x) for name, x in tensors.items()}, config, mesh, "tensors")


def to_huggingface(parameters: Parameters, dtype: Dtype = "float32") -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) in name order: the wire format of published weights.

    Each array is a copy on the host, one at a time: it stays what it is when `Learner.apply` consumes the parameters.
    bfloat16 arrays have ml_dtypes' dtype. A tied head is not repeated.
    """
    for name in sorted(parameters):
        yield name, np.array(parameters[name], dtype=_DTYPES[dtype], copy=True)


def save_folder(folder: Path, parameters: Parameters, *, source: Path, dtype: Dtype = "float32") -> None:
    """Writes a Hugging Face folder: the weights, and config and tokenizer files copied from the folder `source`.

    The weights appear last and whole, under their name: a folder that `has_weights` is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHTS) and path.parent != folder:
            shutil.copyfile(path, folder / path.name)
    stated = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, "torch_dtype": dtype}, indent=2) + "\n")
    partial = folder / "model.safetensors.partial"
    save_file(dict(to_huggingface(parameters, dtype)), partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")


def _place(
    readers: Mapping[str, Callable[[], np.ndarray]], config: DecoderConfig, mesh: Mesh, source: str
) -> Parameters:
    """Reads, checks and places one tensor after the other."""
    shapes = decoder.shapes(config)
    # Some checkpoints repeat the tied head.
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    errors = [f"{name} is missing" for name in sorted(shapes.keys() - readers.keys())]
    errors += [
        f"{name} is unknown to {config.architecture}" for name in sorted(readers.keys() - shapes.keys() - ignored)
    ]
    parameters: Parameters = {}
    for name in sorted(shapes.keys() & readers.keys()):
        tensor = readers[name]()
        if tensor.shape != shapes[name]:
            errors.append(f"{name} has shape {list(tensor.shape)}, must have {list(shapes[name])}")
        elif not errors:
            placed = sharding.parameter_sharding(name, tensor.shape, mesh)
            # `astype` copies: JAX may keep the array that it is given as the buffer.
            parameters[name] = jax.device_put(tensor.astype(np.float32), placed)
    if errors:
        raise ConfigError(source, errors)
    return parameters
