"""From pulled tensors to the engine's weights: arrays in Hugging Face layout in, the model's leaves on the device out.

The engine's own loader does the mapping. Runs beside a serving engine, in any thread but one at a time.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from sgl_jax.srt.configs.load_config import LoadConfig
from sgl_jax.srt.model_executor.model_runner import ModelRunner
from sgl_jax.srt.model_loader.loader import JAXModelLoader
from sgl_jax.srt.utils import weight_utils

from headrace.errors import StartupError
from services.inference.adapter import is_buffer, split

_SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16"}


def stage(runner: ModelRunner, tensors: Mapping[str, np.ndarray], *, first: bool) -> list[jax.Array]:
    """The model's leaves with these weights in them, on the device, typed and laid out as the present ones.

    An adapter's tensors alone leave the base's leaves as they are: the same arrays, not copies.

    Args:
        runner: the engine's model.
        tensors: a version's, by Hugging Face name.
        first: whether the engine holds no weights yet.

    Raises:
        StartupError: a leaf gets no tensor, or one of another shape.
    """
    base, adapter = split(tensors)
    present = runner.model_state_leaves
    names = [_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(nnx.split(runner.model)[1])[0]]
    buffers = {name for name in names if is_buffer(name)}
    if adapter.keys() - buffers:
        raise StartupError(
            f"the trainer publishes an adapter for {min(adapter.keys() - buffers).rpartition('.')[0]}, but"
            " inference.lora does not name that layer; make it match the trainer's"
        )
    if first and not base:
        raise StartupError(
            "the trainer's first version is an adapter without its base; publish the base's tensors once"
        )
    loaded: Mapping[str, Any] = _load(runner, base) if base else {}
    new: dict[str, Any] = {
        name: adapter.get(name, old)
        if name in buffers
        else loaded.get(name.replace(".base_layer.", "."))
        if base
        else old
        for name, old in zip(names, present, strict=True)
    }
    wrong = [
        f"{name} is {_describe(new[name])}, the model has {_describe(old)}"
        for name, old in zip(names, present, strict=True)
        if new[name] is None or new[name].shape != old.shape
    ]
    if missing := adapter and buffers - adapter.keys():
        wrong.append(f"{min(missing)} is missing")
    if wrong:
        raise StartupError(
            f"the trainer's weights do not fit the model in {runner.model_config.model_path}: {'; '.join(wrong[:3])}"
            f" ({len(wrong)} in all); give trainer and engine the same model folder"
        )
    return jax.block_until_ready([_placed(new[name], old) for name, old in zip(names, present, strict=True)])


def _load(runner: ModelRunner, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The leaves, by name, that the engine's own loader makes of Hugging Face tensors; None where it makes none."""
    model_config = copy.copy(runner.model_config)
    model_config._dummy_mode = False
    model_config.headrace_tensors = tensors
    with _loader_that_reads_memory():
        model = JAXModelLoader(LoadConfig(), runner.mesh).load_model(model_config=model_config)
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.split(model)[1])
    return {_name(path): leaf if isinstance(leaf, jax.Array) else None for path, leaf in leaves}


def _placed(new: jax.Array | np.ndarray, old: jax.Array) -> jax.Array:
    if isinstance(new, np.ndarray):
        array = new.astype(old.dtype)
        return jax.make_array_from_callback(array.shape, old.sharding, lambda index: array[index])
    return new if new is old else jax.device_put(new.astype(old.dtype), old.sharding)


def _name(path: tuple[Any, ...]) -> str:
    """A leaf's path, such as "model.layers.0.mlp.up_proj.weight"."""
    words = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    return ".".join(word for word in words if word not in ("value", ".value"))


@contextlib.contextmanager
def _loader_that_reads_memory() -> Iterator[None]:
    """Lets the engine's loader read a model config's `headrace_tensors` where it would read safetensors files.

    The loader knows files only. Its two openings are the scan, which lists what each file holds, and the handle, which
    gives slices of it; names, transpositions, padding, splitting and sharding stay the loader's own business.
    """

    class Handle:
        def __init__(self, tensors: Mapping[str, np.ndarray]):
            self._tensors = tensors

        def get_slice(self, name: str) -> np.ndarray:
            return self._tensors[name]

    def scan(self: Any) -> dict[str, list[dict[str, Any]]]:
        tensors = self.model_config.headrace_tensors
        handle = Handle(tensors)
        return {
            name: [{"file": handle, "shape": tensor.shape, "dtype": _SAFETENSORS_NAMES[tensor.dtype.name]}]
            for name, tensor in tensors.items()
        }

    loader, manager = weight_utils.WeightLoader, weight_utils.SequentialSafetensorManager
    stock = loader._scan_weight_info, manager.get_handle
    loader._scan_weight_info = scan
    manager.get_handle = lambda self, file: file
    try:
        yield
    finally:
        loader._scan_weight_info, manager.get_handle = stock


def _describe(leaf: Any) -> str:
    return "missing" if leaf is None else str(tuple(leaf.shape))
