"""What stands before the engine's routes: the token that callers must bring, and the trace that a call belongs to.

Probes and scrapes bring no token: /health, /ready and /metrics need none. A wrong one is refused there, too, so that a
gateway whose token is wrong finds no engine ready, instead of losing episodes to it.
"""

from __future__ import annotations

import orjson

from headrace import tracing
from headrace.security import Security
from services.inference.server import Application, Receive, Scope, Send

_OPEN = frozenset({"/health", "/ready", "/metrics"})


class Guard:
    """An ASGI application before another."""

    def __init__(self, application: Application, security: Security):
        self._application = application
        self._security = security

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._security.tokens and tracing.recorder() is None:
            return await self._application(scope, receive, send)
        authorization = _header(scope, b"authorization")
        if authorization is not None or scope["path"] not in _OPEN:
            refusal = self._security.refusal(authorization)
            if refusal:
                return await _refuse(send, refusal)
        traceparent = _header(scope, b"traceparent")
        with tracing.received(scope["path"].strip("/"), traceparent):
            return await self._application(scope, receive, send)


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


async def _refuse(send: Send, message: str) -> None:
    body = orjson.dumps({"error": {"message": message}})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
