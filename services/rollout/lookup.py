"""Which engines an address of the run's config stands for.

A name may resolve to several hosts, as that of a headless Service does: then each of them is an engine, and they come
and go. A URL or a literal IP address is one engine, whatever it leads to.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket


def is_name(address: str) -> bool:
    """Whether "host:port" must be looked up. A URL is taken as it is."""
    if "://" in address:
        return False
    try:
        ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return True
    return False


async def resolve(address: str) -> frozenset[str]:
    """Each "host:port" that the name stands for now; empty while it cannot be resolved.

    A host with addresses of both families counts once, by IPv4.
    """
    host, _, port = address.rpartition(":")
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a name with a label that is too long cannot be encoded
        return frozenset()
    four = {f"{entry[4][0]}:{port}" for entry in entries if entry[0] == socket.AF_INET}
    six = {f"[{entry[4][0]}]:{port}" for entry in entries if entry[0] == socket.AF_INET6}
    return frozenset(four or six)
