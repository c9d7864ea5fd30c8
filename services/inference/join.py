"""Tells JAX of the other hosts. Before the engine is imported, for that makes JAX look for its devices."""

from __future__ import annotations

import jax

from headrace.errors import StartupError
from services.inference.hosts import Hosts


def join(hosts: Hosts) -> None:
    """Returns when all hosts have come. Raises StartupError when they do not."""
    if hosts.nodes == 1:
        return
    try:
        jax.distributed.initialize(hosts.coordinator, hosts.nodes, hosts.rank)
    except RuntimeError as error:
        raise StartupError(
            f"host {hosts.rank} of {hosts.nodes} could not join at {hosts.coordinator}: {' '.join(str(error).split())}"
        ) from error
