"""The hosts of one engine, as the command line or a LeaderWorkerSet names them."""

from __future__ import annotations

import dataclasses

from headrace import address
from headrace.errors import StartupError


@dataclasses.dataclass(frozen=True)
class Hosts:
    """`rank` is this host's, from 0; `coordinator` is "host:port" of rank 0, for JAX. One host needs none."""

    nodes: int = 1
    rank: int = 0
    coordinator: str = ""

    @property
    def control(self) -> tuple[str, int]:
        """Where rank 0 tells the others what to do: the port above the coordinator's."""
        host, port = address.split(self.coordinator)
        return host, port + 1


def check(hosts: Hosts, devices: int) -> None:
    """Raises StartupError unless `devices`, those of the whole engine, can lie on these hosts."""
    if hosts.nodes < 1 or not 0 <= hosts.rank < hosts.nodes:
        raise StartupError(f"--node-rank {hosts.rank} must be from 0 to {hosts.nodes - 1}, one below --nodes")
    if hosts.nodes == 1:
        return
    try:
        host, port = address.split(hosts.coordinator)
    except ValueError as error:
        raise StartupError(
            f"--coordinator {error}; it is the first host's, free there with the port above it"
        ) from error
    if not host or not 0 < port < 65535:
        raise StartupError(f"--coordinator {hosts.coordinator!r} must name a host and a port from 1 to 65534")
    if devices % hosts.nodes:
        raise StartupError(
            f"inference.tensor_parallel times inference.data_parallel is {devices}, which {hosts.nodes} hosts cannot"
            " share evenly; correct one of them"
        )
