"""A client of one HTTP service that may be slow, busy or broken: bounded, with deadlines and further attempts.

What enters is a request, what leaves the service's answer or Unreachable; nothing else is raised. It blocks only for
its place among `max_concurrent` requests and for the service.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp

MAX_BODY_BYTES = 4 << 20
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
NOT_CARRIED_OUT = frozenset({425, 429, 503})

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 4.0


class Unreachable(Exception):
    """The service gave no usable answer; the message, one line, says what it gave last."""


@dataclass(frozen=True)
class Reply:
    """An answer."""

    status: int
    text: str


class HttpClient:
    """Requests to one service from all episodes of an environment."""

    def __init__(self, *, max_concurrent: int, timeout_s: float, attempts: int):
        """`timeout_s` is for one attempt. Raises ValueError for numbers that allow no request."""
        if max_concurrent < 1 or attempts < 1 or timeout_s <= 0:
            raise ValueError("max_concurrent and attempts must be 1 or more, timeout_s above 0")
        self._places = asyncio.Semaphore(max_concurrent)
        self._max_concurrent = max_concurrent
        self._timeout_s = timeout_s
        self._attempts = attempts

    async def __aenter__(self) -> HttpClient:
        connector = aiohttp.TCPConnector(limit=self._max_concurrent)
        self._session = aiohttp.ClientSession(connector=connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def send(
        self,
        method: str,
        url: str,
        *,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        may_repeat: bool = True,
    ) -> Reply:
        """The service's answer, of whatever status but those that a further attempt may mend; redirects are answers.

        Args:
            may_repeat: whether the service bears the same request twice; else a further attempt follows only one that
                was not carried out: no connection came about, or the answer was 425, 429 or 503.

        Raises Unreachable after the last attempt.
        """
        failure, carried_out = "", False
        for attempt in range(self._attempts):
            if carried_out and not may_repeat:
                raise Unreachable(f"{method} {url}: {failure[:300]} (no further attempt: it may have been carried out)")
            if attempt:
                pause_s = min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            try:
                async with self._places, asyncio.timeout(self._timeout_s):
                    reply = await self._once(method, url, body, query, headers)
            except TimeoutError:
                failure, carried_out = f"no answer within {self._timeout_s:g} s", True
            except aiohttp.ClientConnectorError as error:
                failure, carried_out = " ".join(f"{type(error).__name__}: {error}".split()), False
            except (aiohttp.ClientError, OSError, ValueError) as error:
                failure, carried_out = " ".join(f"{type(error).__name__}: {error}".split()), True
            else:
                if reply.status not in RETRIED:
                    return reply
                failure = " ".join(f"status {reply.status}: {reply.text}".split())
                carried_out = reply.status not in NOT_CARRIED_OUT
        raise Unreachable(f"{method} {url}: {failure[:300]} ({self._attempts} attempts)")

    async def _once(
        self, method: str, url: str, body: Any, query: Mapping[str, str] | None, headers: Mapping[str, str] | None
    ) -> Reply:
        request = self._session.request(
            method, url, json=body, params=query, headers=headers, allow_redirects=False, raise_for_status=False
        )
        async with request as response:
            content = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                content += chunk
                if len(content) > MAX_BODY_BYTES:
                    raise ValueError(f"the answer is longer than {MAX_BODY_BYTES} bytes")
            return Reply(response.status, content.decode(errors="replace"))
