"""Which axis of the mesh each array is sharded over; the only place that says so.

The mesh has three axes: `data` splits batches by rows and repeats parameters, `fsdp` splits batches by rows and
parameters by hidden units, `tensor` splits heads, feed-forward units and words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from headrace.config import ConfigError

# Axes of each matrix [out, in] by the last part of its module's name; norms are replicated.
_MATRICES: dict[str, tuple[str | None, ...]] = {
    "embed_tokens": ("tensor", "fsdp"),
    "lm_head": ("tensor", "fsdp"),
    "q_proj": ("tensor", "fsdp"),
    "k_proj": ("tensor", "fsdp"),
    "v_proj": ("tensor", "fsdp"),
    "gate_proj": ("tensor", "fsdp"),
    "up_proj": ("tensor", "fsdp"),
    "o_proj": ("fsdp", "tensor"),
    "down_proj": ("fsdp", "tensor"),
    "value_head": (None, "fsdp"),
}


def create_mesh(fsdp: int = -1, tensor: int = 1, *, data: int = 1) -> Mesh:
    """The mesh (`data`, `fsdp`, `tensor`) over all devices; fsdp -1 takes what the others leave.

    Raises:
        ConfigError: the devices cannot be laid out so.
    """
    count = jax.device_count()
    if fsdp == -1:
        fsdp = count // (data * tensor)
    if fsdp < 1 or data * fsdp * tensor != count:
        raise ConfigError(
            "trainer.mesh",
            [
                f"data {data} times fsdp {fsdp} times tensor {tensor} is not the number of devices, {count};"
                " set fsdp to -1"
            ],
        )
    return jax.make_mesh((data, fsdp, tensor), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def row_shards(mesh: Mesh) -> int:
    """Parts that the rows of a batch are split into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def parameter_sharding(name: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Of the parameter with this Hugging Face name; an axis that does not divide its dimension is left out."""
    module, kind = name.split(".")[-2:]
    axes: tuple[str | None, ...] = _MATRICES.get(module, (None,))
    if kind == "bias":
        axes = axes[:1]
    divided = (axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in zip(axes, shape, strict=True))
    return NamedSharding(mesh, PartitionSpec(*divided))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of [B, T] arrays: rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
    """Of scalars."""
    return NamedSharding(mesh, PartitionSpec())


def optimizer_sharding(state: Any, parameters: Mapping[str, NamedSharding], mesh: Mesh) -> Any:
    """Shardings of an optimizer state: moments lie as the parameters that they belong to, counts are replicated."""

    def of(path: tuple[Any, ...], _leaf: Any) -> NamedSharding:
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        return parameters[names[-1]] if names else replicated(mesh)

    return jax.tree_util.tree_map_with_path(of, state)
