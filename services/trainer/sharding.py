"""Which axis of the mesh each array is sharded over; the only place that says so."""

from __future__ import annotations

from jax.sharding import Mesh, NamedSharding


def create_mesh(fsdp: int = -1, tensor: int = 1) -> Mesh:
    """The mesh (`fsdp`, `tensor`) over all devices; fsdp -1 takes what tensor leaves.

    Raises:
        headrace.config.ConfigError: the devices cannot be laid out so.
    """
    raise NotImplementedError


def parameter_sharding(name: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Of the parameter with this Hugging Face name; an axis that does not divide its dimension is left out."""
    raise NotImplementedError


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of [B, T] arrays: rows over fsdp."""
    raise NotImplementedError


def replicated(mesh: Mesh) -> NamedSharding:
    """Of scalars."""
    raise NotImplementedError


def optimizer_shardings(state: object, mesh: Mesh) -> object:
    """Shardings of an optimizer state: moments lie as their parameters do, counts are replicated."""
    raise NotImplementedError
