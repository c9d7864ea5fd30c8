"""A small real HTTP service that answers from a script, for tests of what calls one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Service:
    """What it was asked, and how busy it was."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0


@contextlib.asynccontextmanager
async def web_service(answer: Callable[[int, dict[str, Any]], Any]) -> AsyncIterator[Service]:
    """`answer` takes the request's number, from 0, and what it carries: method, path, query, headers, body.

    It gives an aiohttp response, or "hang", "cut" (the connection), or a number of seconds to wait and a response.
    """
    service = Service()

    async def handle(request: web.Request) -> web.StreamResponse:
        text = await request.text()
        asked = {
            "method": request.method,
            "path": request.path,
            "query": dict(request.query),
            "headers": dict(request.headers),
            "body": json.loads(text) if text else None,
        }
        service.requests.append(asked)
        service.running += 1
        service.most_running = max(service.most_running, service.running)
        try:
            answered = answer(len(service.requests) - 1, asked)
            if isinstance(answered, tuple):
                await asyncio.sleep(answered[0])
                answered = answered[1]
            if answered == "hang":
                await asyncio.Event().wait()
            if answered == "cut":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            return answered
        finally:
            service.running -= 1

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield service
    finally:
        await runner.cleanup()
