"""A small real engine server that answers from a script: the engine's HTTP contract without a model.

POST /generate enters; after the script's delay a reply leaves whose tokens, lengths, faults and versions the script
sets. Nothing blocks: a sleeping request costs one timer, so thousands may sleep at once. A token's version is the one
that was held at the moment the token fell due, so a version that changes during a request splits its spans.

    python -m tests.scripted_engine --listen 127.0.0.1:0 --options '{"tokens": "version", "delay_s": 0.2}'

prints `listening on HOST:PORT`. Besides the contract (/generate, /abort_request, /health, /ready, /get_load,
/policy_version, /metrics) it has, for tests:

    POST /script          merges the given keys of `Script` into the script
    POST /policy_version  {"policy_version": n or null, "run_id"?}; null means that no weights are held
    GET /requests         what /generate received, oldest first: bodies, each with "outcome" added once it ended
    DELETE /requests      forgets them

A test that runs in the server's own event loop starts one with `await ScriptedEngine.start(...)`, and may pass a
policy, a function from (input_ids, sampling_params) to reply ids.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import dataclasses
import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web

from headrace.v1 import trainer_service_pb2 as pb
from headrace.v1 import trainer_service_pb2_grpc
from tests.engine_script import Script, make_reply, spoil

Policy = Callable[[Sequence[int], dict[str, Any]], Sequence[int]]


class ScriptedEngine:
    """The server. `url` is its address; `requests` holds what it received."""

    def __init__(self, script: Script, policy: Policy | None = None):
        self.script = script
        self.requests: deque[dict[str, Any]] = deque(maxlen=200_000)
        self.run_id = "scripted"
        self.url = ""
        self._policy = policy
        self._faults = deque(script.faults)
        self._random = random.Random(script.seed)
        self._replies = 0
        self._running: dict[str, asyncio.Future[None]] = {}
        self._changed = asyncio.Condition()
        # Versions held since start: version i from time i on, seconds of the loop's clock. None: no weights.
        self._times: list[float] = []
        self._versions: list[int | None] = []
        self._runner: web.AppRunner | None = None

    @classmethod
    async def start(
        cls,
        script: Script | None = None,
        *,
        policy: Policy | None = None,
        policy_version: int | None = 0,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> ScriptedEngine:
        """A listening engine that holds `policy_version`; port 0 takes a free one. Close it with `stop`."""
        engine = cls(script or Script(), policy)
        await engine.set_policy_version(policy_version)
        engine._runner = web.AppRunner(
            engine._application(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await engine._runner.setup()
        site = web.TCPSite(engine._runner, host, port, backlog=4096)
        await site.start()
        engine.url = f"http://{host}:{engine._runner.addresses[0][1]}"
        return engine

    async def stop(self) -> None:
        """Cuts every connection and stops listening."""
        if self._runner:
            await self._runner.cleanup()

    @property
    def policy_version(self) -> int | None:
        """The version that is held; None before the first."""
        return self._versions[-1] if self._versions else None

    async def set_policy_version(self, version: int | None) -> None:
        """Swaps: tokens that fall due from now on carry `version`."""
        async with self._changed:
            self._times.append(asyncio.get_running_loop().time())
            self._versions.append(version)
            self._changed.notify_all()

    def set_script(self, script: Script) -> None:
        """Answers calls that arrive from now on by another script."""
        self.script = script
        self._faults = deque(script.faults)

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=64 * 1024 * 1024)
        application.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/get_load", self._load),
                web.get("/policy_version", self._get_version),
                web.get("/metrics", self._metrics),
                web.post("/script", self._post_script),
                web.post("/policy_version", self._post_version),
                web.get("/requests", self._get_requests),
                web.delete("/requests", self._delete_requests),
            ]
        )
        return application

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
            prompt = body["input_ids"]
            sampling = body.get("sampling_params", {})
            limit = int(sampling.get("max_new_tokens", 16))
            if not prompt or limit < 1 or not all(isinstance(token, int) and token >= 0 for token in prompt):
                raise ValueError("input_ids must be non-negative integers and max_new_tokens at least 1")
        except (ValueError, KeyError, TypeError) as error:
            return _error(400, f"bad request: {error!r}")
        self.requests.append(body)
        body["outcome"] = "running"
        try:
            response = await self._answer(request, body, prompt, sampling, limit)
            body["outcome"] = response.status
            return response
        except (asyncio.CancelledError, ConnectionError):
            body["outcome"] = "disconnected"
            raise

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompt: list[int], sampling: dict[str, Any], limit: int
    ) -> web.StreamResponse:
        script = self.script
        fault = self._next_fault()
        if not script.fault_after_delay and (response := await self._strike(fault, request)):
            return response
        if script.draining:
            return _error(503, "draining")
        minimum = body.get("min_policy_version")
        if minimum is not None:
            async with self._changed:
                await self._changed.wait_for(lambda: self.policy_version is not None and self.policy_version >= minimum)
        if self.policy_version is None:
            return _error(503, "no weights yet")
        version = self.policy_version
        rid = body.setdefault("rid", f"request-{len(self.requests)}")
        length = max(1, min(limit, script.length or limit))
        loop = asyncio.get_running_loop()
        first_s = loop.time() + self._delay_s(script)
        due_s = first_s + script.delay_per_token_s * length
        with self._sleeper(rid, due_s) as sleeper:
            await sleeper
        now = loop.time()
        aborted = now < due_s - 0.005
        if aborted:
            length = min(length, math.floor((now - first_s) / script.delay_per_token_s) if now > first_s else 0)
        if script.fault_after_delay and (response := await self._strike(fault, request)):
            return response
        versions = [self._version_at(first_s + script.delay_per_token_s * (i + 1), version) for i in range(length)]
        ids = self._reply(script, prompt, sampling, versions)
        extra_key = body.get("extra_key") or str(version)
        reply = make_reply(script, body, ids, versions, extra_key=extra_key, aborted=aborted)
        return await _send(spoil(reply, fault), fault, request)

    def _next_fault(self) -> str:
        if self._faults:
            return self._faults.popleft()
        return self.script.fault if self._random.random() < self.script.fault_rate else "ok"

    async def _strike(self, fault: str, request: web.Request) -> web.StreamResponse | None:
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "cut":
            if request.transport:
                request.transport.abort()
            raise ConnectionResetError("cut by the script")
        if fault in ("400", "500", "503"):
            return _error(int(fault), f"{fault} by the script")
        return None

    def _delay_s(self, script: Script) -> float:
        if not script.lognormal_mean_s:
            return script.delay_s
        mu = math.log(script.lognormal_mean_s) - script.lognormal_sigma**2 / 2
        return script.delay_s + self._random.lognormvariate(mu, script.lognormal_sigma)

    @contextlib.contextmanager
    def _sleeper(self, rid: str, due_s: float) -> Iterator[asyncio.Future[None]]:
        """A future that is done at `due_s`, or before when the request is aborted."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        timer = loop.call_at(due_s, _wake, future)
        self._running[rid] = future
        try:
            yield future
        finally:
            timer.cancel()
            self._running.pop(rid, None)

    def _version_at(self, time_s: float, fallback: int) -> int:
        version = self._versions[max(0, bisect.bisect_right(self._times, time_s) - 1)]
        return fallback if version is None else max(version, fallback)

    def _reply(self, script: Script, prompt: list[int], sampling: dict[str, Any], versions: list[int]) -> list[int]:
        stops = sampling.get("stop_token_ids") or []
        if self._policy:
            ids = list(self._policy(prompt, sampling))[: len(versions)]
        elif script.tokens == "version":
            ids = list(versions)
        elif script.tokens == "random":
            ids = self._random.choices(script.choices, k=len(versions))
        else:
            assert isinstance(script.tokens, list)
            ids = script.tokens[self._replies % len(script.tokens)][: len(versions)]
            self._replies += 1
        if script.end_with_stop and stops and ids:
            ids[-1] = stops[0]
        first_stop = next((i for i, token in enumerate(ids) if token in stops), len(ids))
        return ids if sampling.get("ignore_eos") else ids[: first_stop + 1]

    async def _abort(self, request: web.Request) -> web.Response:
        rid = json.loads(await request.read()).get("rid")
        if rid in self._running:
            _wake(self._running[rid])
        return web.json_response({})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _ready(self, request: web.Request) -> web.Response:
        if self.policy_version is None or self.script.draining:
            return _error(503, "no weights yet" if self.policy_version is None else "draining")
        return web.json_response({})

    async def _load(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "policy_version": self.policy_version,
                "running": len(self._running),
                "waiting": 0,
                "kv_used_tokens": self.script.kv_used_tokens,
                "kv_capacity_tokens": 1_000_000,
            }
        )

    async def _get_version(self, request: web.Request) -> web.Response:
        return web.json_response({"run_id": self.run_id, "policy_version": self.policy_version, "root_hash": ""})

    async def _metrics(self, request: web.Request) -> web.Response:
        name = "headrace_inference_running_requests"
        return web.Response(text=f"# TYPE {name} gauge\n{name} {len(self._running)}\n", content_type="text/plain")

    async def _post_script(self, request: web.Request) -> web.Response:
        try:
            self.set_script(dataclasses.replace(self.script, **{"faults": [], **json.loads(await request.read())}))
        except (TypeError, ValueError) as error:
            return _error(400, str(error))
        return web.json_response(dataclasses.asdict(self.script))

    async def _post_version(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.run_id = body.get("run_id", self.run_id)
        await self.set_policy_version(body["policy_version"])
        return web.json_response({"run_id": self.run_id, "policy_version": self.policy_version})

    async def _get_requests(self, request: web.Request) -> web.Response:
        return web.json_response(list(self.requests))

    async def _delete_requests(self, request: web.Request) -> web.Response:
        self.requests.clear()
        return web.json_response({})


async def follow_trainer(engine: ScriptedEngine, address: str) -> None:
    """Takes every version that a trainer announces, for ever; the tensors are not fetched."""
    while True:
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                trainer = trainer_service_pb2_grpc.TrainerServiceStub(channel)
                request = pb.WatchWeightsRequest(engine="scripted")
                if engine.policy_version is not None:
                    request.held_policy_version = engine.policy_version
                async for news in trainer.WatchWeights(request):
                    engine.run_id = news.run_id
                    if engine.policy_version is None or news.policy_version > engine.policy_version:
                        await engine.set_policy_version(news.policy_version)
        except grpc.aio.AioRpcError:
            pass
        await asyncio.sleep(0.2)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


async def _send(reply: dict[str, Any], fault: str, request: web.Request) -> web.StreamResponse:
    if fault == "garbage":
        return web.Response(body=b"\x00<html>not json", content_type="application/json")
    if fault == "cut_body":
        data = json.dumps(reply).encode()
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        if request.transport:
            request.transport.close()
        return response
    return web.json_response(reply)


async def _serve(arguments: argparse.Namespace) -> None:
    script = arguments.script.read_text() if arguments.script else "{}"
    options = {**json.loads(script), **json.loads(arguments.options)}
    host, _, port = arguments.listen.rpartition(":")
    version = None if arguments.trainer else arguments.policy_version
    engine = await ScriptedEngine.start(Script(**options), policy_version=version, host=host, port=int(port))
    print(f"listening on {engine.url.removeprefix('http://')}", flush=True)
    try:
        if arguments.trainer:
            await follow_trainer(engine, arguments.trainer)
        await asyncio.Event().wait()
    finally:
        await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scripted_engine", description=__doc__.split("\n")[0])
    parser.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT; port 0 takes a free one")
    parser.add_argument("--script", type=Path, help="JSON file with keys of Script")
    parser.add_argument("--options", default="{}", help="JSON with keys of Script; wins over --script")
    parser.add_argument("--policy-version", type=int, default=0, help="version that is held at the start")
    parser.add_argument("--trainer", help="HOST:PORT of a trainer whose announced versions are taken")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
