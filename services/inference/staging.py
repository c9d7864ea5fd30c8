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

_SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16"}


def stage(runner: ModelRunner, tensors: Mapping[str, np.ndarray]) -> list[jax.Array]:
    """The model's leaves with these weights in them, on the device, typed and laid out as the present ones.

    Raises:
        StartupError: a leaf gets no tensor, or one of another shape.
    """
    model_config = copy.copy(runner.model_config)
    model_config._dummy_mode = False
    model_config.headrace_tensors = tensors
    with _loader_that_reads_memory():
        model = JAXModelLoader(LoadConfig(), runner.mesh).load_model(model_config=model_config)
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.split(model)[1])
    present = runner.model_state_leaves
    wrong = [
        f"{jax.tree_util.keystr(path)} is {_describe(new)}, the model has {_describe(old)}"
        for (path, new), old in zip(leaves, present, strict=True)
        if not isinstance(new, jax.Array) or new.shape != old.shape
    ]
    if wrong:
        raise StartupError(
            f"the trainer's weights do not fit the model in {runner.model_config.model_path}: {'; '.join(wrong[:3])}"
            f" ({len(wrong)} in all); give trainer and engine the same model folder"
        )
    placed = [
        jax.device_put(new.astype(old.dtype), old.sharding) for (_, new), old in zip(leaves, present, strict=True)
    ]
    return jax.block_until_ready(placed)


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
    return str(tuple(leaf.shape)) if isinstance(leaf, jax.Array) else "missing"
