"""TLS and tokens by flags, for what reads no run file: a server of a class, and the kit that calls anybody's server.

The flags mean what section security of a run file does, and are held to the same: a token needs TLS.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from headrace import security
from headrace.errors import StartupError
from headrace.security import Security


@dataclass(frozen=True)
class _Files:
    """A TlsFiles."""

    certificate: Path | None
    key: Path | None
    authority: Path | None
    client_certificates: bool


def add(parser: argparse.ArgumentParser, *, serves: bool) -> None:
    """Adds the flags of a server, or of one who calls a server."""
    group = parser.add_argument_group("security", "without these: plaintext, and no token")
    if not serves:
        group.add_argument("--tls", action="store_true", help="the server's certificate is of a known authority")
    whose = "our certificate" if serves else "our certificate, for a server that asks for one"
    group.add_argument("--tls-certificate", metavar="PEM", type=Path, help=whose)
    group.add_argument("--tls-key", metavar="PEM", type=Path, help="its key, without a password")
    signed = "ask callers for a certificate that this authority signed" if serves else "who signed the server's"
    group.add_argument("--tls-authority", metavar="PEM", type=Path, help=signed)
    what = "what callers must send: a token a line, any will do" if serves else "the token to send, its first line"
    group.add_argument("--token-file", metavar="FILE", type=Path, help=what)


def given(arguments: argparse.Namespace) -> list[str]:
    """Those of the flags that are set."""
    names = ("tls", "tls_certificate", "tls_key", "tls_authority", "token_file")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name, None)]


def read(arguments: argparse.Namespace, *, serves: bool) -> Security:
    """What the flags say, files read. Raises StartupError."""
    flags = given(arguments)
    speaks = any(flag.startswith("--tls") for flag in flags)
    if ("--tls-certificate" in flags) != ("--tls-key" in flags):
        raise StartupError("--tls-certificate and --tls-key belong together: give both")
    if serves and speaks and "--tls-certificate" not in flags:
        raise StartupError("--tls-authority is for checking callers: give --tls-certificate and --tls-key, too")
    if "--token-file" in flags and not speaks:
        how = "--tls-certificate and --tls-key" if serves else "--tls-authority, or --tls"
        raise StartupError(f"--token-file needs TLS, for a token that is sent in plaintext is no secret: give {how}")
    authority = arguments.tls_authority
    files = _Files(arguments.tls_certificate, arguments.tls_key, authority, serves and authority is not None)
    return security.read(files if speaks else None, arguments.token_file)
