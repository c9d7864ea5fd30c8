"""What the gateway asks of an engine, whichever server it is, and the HTTP that it asks by.

A dialect turns a `Call` into its server's requests and the replies into a `Reply`; it decides nothing. Who is asked,
how long is waited and what is tried again is decided in router.py and inference.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp
from yarl import URL

from headrace import security, tracing
from headrace.security import PLAIN, Security
from services.rollout.sample import Sample
from services.rollout.window import Load

CONNECT_S = 10.0  # a host that is gone without a word would else be tried until the call's deadline
_KEEPALIVE_S = 3.0  # below the 5 s after which an engine's server cuts an idle connection
_HEADERS = {"Content-Type": "application/json"}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call that samples. `tokens`: the ids so far, as JSON without brackets. `space`: the episode's namespace in
    prefix caches; empty on its first call."""

    rid: str
    tokens: str
    max_new_tokens: int
    temperature: float
    stop_token_ids: Sequence[int]
    min_policy_version: int
    space: str
    vocabulary_size: int


@dataclasses.dataclass(frozen=True)
class Reply:
    """What came of a call. `space`: the namespace that it was computed in."""

    sample: Sample
    space: str


class HttpError(Exception):
    """A status other than 200, and one line of the body."""

    def __init__(self, status: int, message: str):
        self.status, self.message = status, message
        super().__init__(f"{status}: {message}")


class Http:
    """The gateway's connections to engines. Use it as an async context manager."""

    def __init__(self, secured: Security = PLAIN, *, connect_s: float = CONNECT_S):
        self._connect_s = connect_s
        self.scheme = "https" if secured.tls else "http"
        self._security = secured
        self._tls = secured.client_context() or True  # aiohttp's word for the default
        self._headers = {**_HEADERS, **({"Authorization": secured.authorization} if secured.tokens else {})}
        self._names: dict[str, str] = {}  # that certificates of hosts bear, by host:port

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ssl=self._tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
            headers=self._headers,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    def name(self, host: str, name: str) -> None:
        """The host:port, which was looked up, shows the certificate of this HOST:PORT."""
        self._names[host] = name.rpartition(":")[0]

    async def diagnose(self, url: URL) -> str:
        """Why no connection comes about, see headrace.security."""
        return await security.diagnose(url.authority, self._security, name=self._names.get(url.authority, ""))

    async def post(self, url: URL, body: bytes) -> bytes:
        """The body of a 200. Raises HttpError, aiohttp.ClientError and OSError."""
        headers = tracing.headers()
        if headers:
            tracing.note(engine=str(url.origin()))
        name = self._names.get(url.authority)
        async with self._session.post(url, data=body, headers=headers, server_hostname=name) as response:
            return _checked(response.status, await response.read())

    async def get(self, url: URL) -> bytes:
        """Likewise."""
        async with self._session.get(url, server_hostname=self._names.get(url.authority)) as response:
            return _checked(response.status, await response.read())


class Dialect(Protocol):
    """One kind of engine server. Everything raises HttpError, aiohttp.ClientError and OSError."""

    async def look(self, http: Http, root: URL) -> Load | None:
        """What the engine says of itself; None if it takes calls but does not tell."""

    async def generate(self, http: Http, root: URL, call: Call) -> Reply:
        """The outcome of a call. Raises BadReply too."""

    async def abort(self, http: Http, root: URL, rid: str) -> None:
        """Frees the engine of a call that nobody waits for."""


def _checked(status: int, body: bytes) -> bytes:
    if status != 200:
        raise HttpError(status, _message(body))
    return body


def _message(body: bytes) -> str:
    """One line of an error's body."""
    try:
        tree: Any = json.loads(body)
        error = tree["error"] if "error" in tree else tree["detail"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = body[:200].decode(errors="replace")
    return " ".join(text.split())[:200]
