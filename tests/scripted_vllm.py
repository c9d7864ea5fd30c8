"""A small real server that answers as vLLM 0.32 documents, from a script, without a model.

A token's id is the version whose weights were loaded when it was drawn. What it has of vLLM's API: /v1/completions,
/health, /metrics, and with `dev_mode` the control endpoints of the RL router. An update really reads the safetensors
file that it is given; between start and finish the weights are torn, and a token drawn then would be `TORN`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from collections import deque
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors.numpy import load_file

TORN = 0


@dataclasses.dataclass
class Script:
    """How to answer."""

    delay_per_token_s: float = 0.0
    end_with_stop: bool = False  # makes the last token the first of stop_token_ids
    dev_mode: bool = True
    has_checker: bool = True
    ignores_updates: bool = False  # update_weights answers and does nothing
    faults: list[str] = dataclasses.field(default_factory=list)  # of completions: 400, 500, 503, cut, garbage
    control_faults: dict[str, list[int]] = dataclasses.field(default_factory=dict)  # statuses, by path


class ScriptedVllm:
    """The server. `url` is its address; `requests` and `controls` hold what it received."""

    def __init__(self, script: Script, weight_version: str):
        self.script = script
        self.weight_version = weight_version
        self.version = int(weight_version.rpartition("/")[2]) if "/" in weight_version else TORN
        self.tensors: dict[str, Any] = {}
        self.requests: list[dict[str, Any]] = []
        self.controls: list[str] = []
        self.url = ""
        self.running = 0
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._abort = asyncio.Event()
        self._updating = False
        self._loaded_path = ""
        self._faults = deque(script.faults)
        self._runner: web.AppRunner

    @classmethod
    async def start(
        cls, script: Script | None = None, *, weight_version: str = "default", port: int = 0
    ) -> ScriptedVllm:
        """A listening server. Close it with `stop`."""
        server = cls(script or Script(), weight_version)
        application = web.Application(client_max_size=64 * 1024 * 1024)
        application.add_routes([web.route("*", "/{path:.*}", server._handle)])
        server._runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await server._runner.setup()
        await web.TCPSite(server._runner, "127.0.0.1", port).start()
        server.url = f"http://127.0.0.1:{server._runner.addresses[0][1]}"
        return server

    async def stop(self) -> None:
        """Cuts every connection and stops listening."""
        await self._runner.cleanup()

    def hold(self, weight_version: str) -> None:
        """New weights, at once, as if an update had come between two tokens."""
        self.weight_version, self.version = weight_version, int(weight_version.rpartition("/")[2])

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path.strip("/")
        if path == "v1/completions":
            return await self._complete(request)
        if path == "health":
            return web.Response()
        if path == "metrics":
            lines = [
                f'vllm:num_requests_running{{engine="0",model_name="policy"}} {self.running}.0',
                'vllm:num_requests_waiting{engine="0",model_name="policy"} 0.0',
                'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0',
                'vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25',
                'vllm:num_preemptions_total{engine="0",model_name="policy"} 3.0',
            ]
            return web.Response(text="\n".join(lines) + "\n")
        if not self.script.dev_mode:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = json.loads(await request.read() or b"{}")
        return self._control(path, request.query.get("mode", "abort"), body)

    def _control(self, path: str, mode: str, body: dict[str, Any]) -> web.Response:
        if path == "weight_info":
            return web.json_response({"weight_version": self.weight_version})
        self.controls.append(path if path != "pause" else f"pause?mode={mode}")
        if faults := self.script.control_faults.get(path):
            status = faults.pop(0)
            if status != 200:
                return web.json_response({"error": f"{status} by the script"}, status=status)
        if path == "pause":
            self._resumed.clear()
            if mode == "abort":
                self._abort.set()
                self._abort = asyncio.Event()
            return web.json_response({"status": "paused"})
        if path == "resume":
            self._resumed.set()
            return web.json_response({"status": "resumed"})
        if path == "start_weight_update":
            if self._updating:
                return web.json_response({"error": "start_weight_update called while an update is active"}, status=500)
            self._updating, self._loaded_path = True, ""
            return web.json_response({"message": "Weight update started"})
        if path == "update_weights":
            if "update_info" not in body:
                return web.json_response({"detail": "Missing 'update_info' in request body"}, status=400)
            if not self._updating:
                return web.json_response({"error": "no update is active"}, status=500)
            if not self.script.ignores_updates:
                self.version = TORN
                self._loaded_path = body["update_info"]["path"]
                self.tensors = load_file(Path(self._loaded_path) / "model.safetensors")
            return web.json_response({"message": "Weights updated"})
        if path == "finish_weight_update":
            self._updating = False
            if body.get("weight_version"):
                self.hold(body["weight_version"])
            return web.json_response({"message": "Weight update finished"})
        if path == "weight_checker" and self.script.has_checker:
            if not self._resumed.is_set():
                return web.json_response({"detail": "requires an unpaused engine"}, status=409)
            sums = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in self.tensors.items()}
            return web.json_response({"checksums": sums})
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.requests.append(body)
        fault = self._faults.popleft() if self._faults else ""
        if fault == "cut":
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        if fault == "garbage":
            return web.Response(body=b"<html>")
        if fault:
            error = {"message": f"{fault} by the script", "type": "BadRequestError", "param": None, "code": int(fault)}
            return web.json_response({"error": error}, status=int(fault))
        self.running += 1
        try:
            ids, aborted = await self._draw(body["max_tokens"])
        finally:
            self.running -= 1
        if self.script.end_with_stop and not aborted:
            ids[-1] = body["stop_token_ids"][0]
        stopped = bool(ids) and ids[-1] in body["stop_token_ids"]
        reason = "abort" if aborted else "stop" if stopped else "length"
        return web.json_response(
            {
                "id": f"cmpl-{body['request_id']}",
                "object": "text_completion",
                "created": 0,
                "model": "policy",
                "choices": [
                    {
                        "index": 0,
                        "text": "",
                        "logprobs": {
                            "text_offset": [],
                            "token_logprobs": [-1.0] * len(ids),
                            "tokens": [f"token_id:{token}" for token in ids],
                            "top_logprobs": [],
                        },
                        "finish_reason": reason,
                        "stop_reason": ids[-1] if reason == "stop" else None,
                        "token_ids": ids,
                        "prompt_token_ids": body["prompt"],
                    }
                ],
                "usage": {
                    "prompt_tokens": len(body["prompt"]),
                    "completion_tokens": len(ids),
                    "total_tokens": len(body["prompt"]) + len(ids),
                },
            }
        )

    async def _draw(self, count: int) -> tuple[list[int], bool]:
        """(ids, whether a pause has aborted it). Waits while the server is paused."""
        ids: list[int] = []
        await self._resumed.wait()  # one that comes during a pause waits, whatever the pause's mode
        abort = asyncio.ensure_future(self._abort.wait())
        try:
            for _ in range(count):
                if self.script.delay_per_token_s:
                    await asyncio.wait([abort], timeout=self.script.delay_per_token_s)
                if abort.done():
                    return ids, True
                await self._resumed.wait()
                ids.append(self.version)
            return ids, False
        finally:
            abort.cancel()
