"""The process beside a vLLM server: pulls versions from the trainer and brings them in. Wiring, and what it answers.

    GET /health           200 while it lives
    GET /ready            200 when the server holds what was brought in
    GET /policy_version   the version, as an engine of our own tells it
    GET /metrics          Prometheus

Gateways call the vLLM server itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import aiohttp
import grpc.aio
import orjson

from headrace import address, config, rpc
from headrace.security import Security
from services.inference.metrics import Metrics
from services.inference.server import Receive, Scope, Send
from services.inference.vllm import VllmServer
from services.inference.weights import Hold, Puller, Version

log = logging.getLogger(__name__)

Listening = Callable[[Any], contextlib.AbstractAsyncContextManager[int]]


async def run(
    settings: config.Config,
    *,
    name: str,
    stop: asyncio.Event,
    channel: grpc.aio.Channel,
    security: Security,
    listening: Listening,
) -> None:
    """Follows the trainer until `stop` is set.

    Args:
        settings: the run's.
        name: unique among the run's engines.
        stop: ends it.
        channel: to the trainer.
        security: how the trainer and the server are called.
        listening: serves an ASGI application while its body runs.

    Raises:
        StartupError: what a user must correct.
    """
    inference = settings.inference
    headers = {"Authorization": security.authorization} if security.tokens else {}
    metrics, hold = Metrics(), Hold()
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as session:
        server = VllmServer(
            session,
            inference.vllm.url,
            weights_folder=inference.vllm.weights_folder,
            update=inference.update,
            timeout_s=inference.vllm.timeout_s,
        )

        async def install(version: Version) -> None:
            seconds = await server.install(version)
            metrics.installed(*seconds)
            log.info("version %d is in use: written in %.3f s, loaded in %.3f s", version.policy_version, *seconds)

        puller = Puller(
            channel,
            engine=name,
            run_id=settings.run.id,
            install=install,
            observer=metrics,
            hold=hold,
            keeps=bool(settings.trainer.delta_bases),
            trainer_host=address.split(settings.trainer.address)[0],
            security=security,
        )
        async with listening(_Application(server, metrics)) as port, asyncio.TaskGroup() as tasks:
            log.info("puller %s of run %s for %s listens on port %d", name, settings.run.id, inference.vllm.url, port)
            working = [
                tasks.create_task(puller.run()),
                tasks.create_task(server.keep_installed()),
                tasks.create_task(rpc.explain_failures(channel, settings.trainer.address, security)),
            ]
            await stop.wait()
            for task in working:
                task.cancel()
    log.info("stopped")


class _Application:
    """What it answers, as a bare ASGI application."""

    def __init__(self, server: VllmServer, metrics: Metrics):
        self._server, self._metrics = server, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, body, content_type = 200, b"{}", b"application/json"
        match scope["path"]:
            case "/health":
                pass
            case "/ready":
                status = 200 if await self._server.ready() else 503
            case "/policy_version":
                held = self._server.held
                body = orjson.dumps(
                    {
                        "run_id": held and held.run_id,
                        "policy_version": held and held.policy_version,
                        "root_hash": held and held.root_hash,
                    }
                )
            case "/metrics":
                body, content_type = self._metrics.text(), b"text/plain; version=0.0.4; charset=utf-8"
            case _:
                status = 404
        headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
