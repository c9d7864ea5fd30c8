"""Who may call whom: TLS and bearer tokens, from files that are read once, when a process starts.

A server shows its certificate and asks callers for a token; a caller checks the one and sends the other. The token file
holds one token a line: a server takes any of them, a caller sends the first, so a token is changed without a pause by
two restarts, with the new one above the old one in between. What is wrong is told in one line that names the file and
never what is in it. `diagnose` finds out why a connection to a server that is there does not come about.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import grpc

from headrace import address as addresses
from headrace.errors import StartupError

_SHORTEST_TOKEN = 16
_DIAGNOSIS_S = 5.0
_FIRST_WORDS_S = 0.5  # a server that refuses our certificate says so after the handshake
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_TLS_ALERT = b"\x15\x03"


class TlsFiles(Protocol):
    """Section security.tls of a run file, or what stands for it. A caller needs neither certificate nor key."""

    @property
    def certificate(self) -> Path | None: ...
    @property
    def key(self) -> Path | None: ...
    @property
    def authority(self) -> Path | None: ...
    @property
    def client_certificates(self) -> bool: ...


@dataclass(frozen=True)
class Tls:
    """One side's part in TLS: PEM, as read."""

    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)
    authority: bytes = b""  # who signs the others' certificates; empty: the system's authorities
    client_certificates: bool = False
    files: tuple[Path, Path] | None = None  # of certificate and key


@dataclass(frozen=True)
class Security:
    """What a process shows, and what it asks for. Of nothing: plaintext, and anybody may call."""

    tls: Tls | None = None
    tokens: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Security(tls={self.tls is not None}, tokens={len(self.tokens)})"

    @property
    def authorization(self) -> str:
        """The header that a caller sends; empty without a token."""
        return f"Bearer {self.tokens[0]}" if self.tokens else ""

    def refusal(self, authorization: str | None) -> str:
        """Why a server refuses a call with this header; empty: it does not. In constant time for a length."""
        if not self.tokens:
            return ""
        if not authorization:
            return "this server asks for a token: send `authorization: Bearer TOKEN`; set security.token_file"
        given = authorization.removeprefix("Bearer ").encode()
        fitting = [hmac.compare_digest(given, token.encode()) for token in self.tokens]
        return "" if any(fitting) else "the token is wrong: give both sides the same security.token_file"

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """For a gRPC server; None: plaintext."""
        if self.tls is None:
            return None
        asks = self.tls.client_certificates
        return grpc.ssl_server_credentials(
            [(self.tls.key, self.tls.certificate)],
            root_certificates=self.tls.authority if asks else None,
            require_client_auth=asks,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """For a gRPC channel, the token included; None: plaintext."""
        if self.tls is None:
            return None
        tls = grpc.ssl_channel_credentials(
            self.tls.authority or None, self.tls.key or None, self.tls.certificate or None
        )
        if not self.tokens:
            return tls
        return grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials(self.tokens[0]))

    def client_context(self) -> ssl.SSLContext | None:
        """For an HTTP client; None: plaintext."""
        if self.tls is None:
            return None
        context = ssl.create_default_context(cadata=self.tls.authority.decode() or None)
        if self.tls.files is not None:
            context.load_cert_chain(*self.tls.files)
        return context


PLAIN = Security()


def read(tls: TlsFiles | None, token_file: Path | None) -> Security:
    """Raises StartupError: a file cannot be read, or is not what it should be."""
    return Security(None if tls is None else _read_tls(tls), () if token_file is None else _read_tokens(token_file))


def caller(security: Security, *, tls: bool, token_file: Path | None) -> Security:
    """How to call a server with a token of its own, which gets none of ours.

    Args:
        security: the process's own; its certificate and authority serve here too.
        tls: whether that server speaks TLS.
        token_file: that server's token.
    """
    tokens = () if token_file is None else _read_tokens(token_file)
    return Security((security.tls or Tls()) if tls else None, tokens)


async def diagnose(address: str, security: Security, *, name: str = "") -> str:
    """Why no connection to a server of ours comes about: a line with the remedy. Empty: it does, or nothing listens.

    `name` is the host that its certificate is for, where that is not the address's.
    """
    try:
        host, port = addresses.split(address)
    except ValueError:
        return ""
    try:
        async with asyncio.timeout(_DIAGNOSIS_S):
            if security.tls is None:
                return await _try_plaintext(host, port)
            return await _try_tls(host, port, security, name or host)
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate of {address} is not to be trusted ({error.verify_message}): it must be signed by"
            f" security.tls.authority, and name {name or host}"
        )
    except (ssl.SSLError, ConnectionResetError):
        return f"{address} speaks no TLS, but we do: set security.tls there too, or nowhere" if security.tls else ""
    except (OSError, TimeoutError):
        return ""


async def _try_tls(host: str, port: int, security: Security, name: str) -> str:
    context = security.client_context()
    assert context is not None
    context.set_alpn_protocols(["h2", "http/1.1"])  # gRPC takes nothing but the former
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name)
    with contextlib.closing(writer):
        try:
            async with asyncio.timeout(_FIRST_WORDS_S):
                refused = not await reader.read(1)
        except (ssl.SSLError, ConnectionResetError):
            refused = True
        except TimeoutError:  # an HTTP server waits for our words
            refused = False
    if refused:
        return f"{host}:{port} refuses our certificate: its security.tls.authority must have signed that"
    return ""


async def _try_plaintext(host: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    with contextlib.closing(writer):
        writer.write(_HTTP2_PREFACE)
        answer = b""
        with contextlib.suppress(ConnectionResetError, TimeoutError):
            async with asyncio.timeout(_FIRST_WORDS_S):
                answer = await reader.read(2)
    # A server of either kind that speaks plaintext answers with frames, or an HTTP error.
    if answer == _TLS_ALERT or not answer:
        return f"{host}:{port} does not answer plaintext: if it speaks TLS, set security.tls here too"
    return ""


def _read_tls(files: TlsFiles) -> Tls:
    authority = b"" if files.authority is None else _read(files.authority, "security.tls.authority")
    try:
        if authority:
            ssl.create_default_context(cadata=authority.decode())
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
        raise StartupError(f"security.tls.authority: {files.authority} holds no certificates as PEM") from error
    if files.certificate is None or files.key is None:
        return Tls(authority=authority)
    certificate = _read(files.certificate, "security.tls.certificate")
    key = _read(files.key, "security.tls.key")
    try:
        ssl.create_default_context().load_cert_chain(files.certificate, files.key, password=lambda: "")
    except (ssl.SSLError, OSError) as error:
        raise StartupError(
            f"security.tls: {files.certificate} and {files.key} are no certificate and its key, as PEM"
            f" without a password ({_reason(error)}); correct them"
        ) from error
    return Tls(certificate, key, authority, files.client_certificates, (files.certificate, files.key))


def _read_tokens(path: Path) -> tuple[str, ...]:
    try:
        tokens = tuple(_read(path, "token_file").decode("ascii").split())
    except UnicodeDecodeError as error:
        raise StartupError(f"token_file: {path} holds more than ASCII; write one token a line") from error
    if not tokens or min(map(len, tokens)) < _SHORTEST_TOKEN:
        raise StartupError(
            f"token_file: {path} must hold a token of at least {_SHORTEST_TOKEN} characters a line: make one with"
            " `openssl rand -hex 32`"
        )
    return tokens


def _read(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"{key}: {path} cannot be read ({error.strerror}); give a file that we may read") from error


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)
