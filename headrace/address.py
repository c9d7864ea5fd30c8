"""HOST:PORT, as run files and command lines give it. Pure."""

from __future__ import annotations

from headrace.errors import StartupError


def split(address: str) -> tuple[str, int]:
    """Host, without an IPv6 address's brackets, and port of "host:port"; the host may be empty.

    Raises ValueError: it is none. The system's own functions take a port modulo 65536, or raise what no OSError is.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 65536):
        raise ValueError(f"{address!r} is no HOST:PORT; give both, the port from 0 to 65535")
    return host.strip("[]"), int(port)


def of_flag(flag: str, value: str) -> tuple[str, int]:
    """`split` of what a command line's flag was given. Raises StartupError, which names the flag."""
    try:
        return split(value)
    except ValueError as error:
        raise StartupError(f"{flag} {error}") from error
