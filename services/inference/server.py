"""The engine's HTTP server: our routes on top of SGLang's own application.

POST /generate takes a tokenized request and answers once it has ended, with the ids, logprobs and versions of what was
sampled. It holds a request until the weights are as new as the request demands, and aborts one whose client has left.
POST /weights {"hold_s": n} keeps the engine on the version that it holds for n seconds; 0 lets it follow the trainer.
Nothing else stops an engine: the stock routes that would, until somebody calls another, are refused.
What this file does not route goes to the stock application, whose own /generate is found at /sglang/generate.

Written as a bare ASGI application: agents make very many short calls, and FastAPI's machinery costs more than the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import orjson

from services.inference.metrics import Metrics
from services.inference.request import BadRequest, Request, parse

if TYPE_CHECKING:  # the engine is loaded after the port is bound: that takes seconds
    from services.inference.mailbox import Finished
    from services.inference.sglang_jax import Engine
from services.inference.weights import Hold

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_UNWATCHED_S = 0.25  # a request that ends within it is answered without asking whether its client still listens
_CLIENT_LEFT = 499
_LONGEST_HOLD_S = 86_400.0
_HAND_OVER_S = 5.0  # for the step that runs, and for the replies to be written
_REFUSED = {
    "/pause_generation": "an engine would stay paused if whoever paused it died",
    "/continue_generation": "engines are not paused here",
    "/release_memory_occupation": "the engine has no way to do so, and its scheduler would end",
    "/resume_memory_occupation": "the engine has no way to do so, and its scheduler would end",
}
_JSON = b"application/json"
_PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


class Server:
    """The application. It answers from the start; `engine` and `stock` join when they are up."""

    def __init__(self, metrics: Metrics, hold: Hold):
        self.engine: Engine | None = None
        self.stock: Application | None = None
        self._metrics = metrics
        self._hold = hold
        self._draining = asyncio.Event()
        self._unanswered = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._engine_ids: dict[str, set[str]] = {}  # of running requests, by the id that the client gave
        self._reads = {
            "/health": lambda: (200, {}),
            "/ready": self._ready,
            "/get_load": self._load,
            "/policy_version": self._policy_version,
        }

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests and returns when the running ones have been answered.

        Those that have not ended after `timeout_s` seconds are handed over: their clients get what has been sampled
        until then, with finish reason "abort", and go on from there elsewhere.
        """
        self._draining.set()
        if await self._answered(within_s=timeout_s) or self.engine is None:
            return
        log.info("handing over %d requests", self._unanswered)
        self.engine.abort_all()
        if not await self._answered(within_s=_HAND_OVER_S):
            log.warning("%d requests are cut off", self._unanswered)

    async def _answered(self, *, within_s: float) -> bool:
        """Whether no request is left to be answered, at the latest after so many seconds."""
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if path == "/generate":
            if method != "POST":
                return await _send(send, 405, _error("use POST"))
            with self._answering():
                status, body = await self._generate(receive)
                self._metrics.answered(status)
                return None if status == _CLIENT_LEFT else await _send(send, status, body)
        if method == "GET" and path in self._reads:
            return await _send(send, *self._reads[path]())
        if method == "GET" and path == "/metrics":
            return await _send(send, 200, self._metrics.text(), content_type=_PROMETHEUS)
        if method == "POST" and path == "/abort_request":
            return await _send(send, *self._abort(await _read(receive)))
        if method == "POST" and path == "/weights":
            return await _send(send, *await self._control_weights(await _read(receive)))
        if path in _REFUSED:
            return await _send(send, 400, _error(f'refused: {_REFUSED[path]}; use POST /weights {{"hold_s": SECONDS}}'))
        status, body = self._ready()
        if status != 200:
            return await _send(send, status, body)
        if self.stock is None:
            return await _send(send, 404, _error("an engine of several hosts has no stock API, only /generate"))
        if path == "/sglang/generate":
            scope = {**scope, "path": "/generate", "raw_path": b"/generate"}
        with self._answering():
            return await self.stock(scope, receive, send)

    async def _generate(self, receive: Receive) -> tuple[int, Any]:
        data = await _read(receive)
        if data is None:
            return _CLIENT_LEFT, None
        engine = self.engine
        if engine is None or self._draining.is_set():
            return 503, _error("the engine is starting" if engine is None else "the engine is draining")
        try:
            request = parse(data, engine)
        except BadRequest as error:
            return 400, _error(str(error))
        return await self._answer(engine, request, receive)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """A drain waits for the body's end."""
        self._unanswered += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._unanswered -= 1
            if not self._unanswered:
                self._idle.set()

    async def _answer(self, engine: Engine, request: Request, receive: Receive) -> tuple[int, Any]:
        if request.min_policy_version is not None and not await self._wait_for_version(engine, request, receive):
            return (503, _error("the engine is draining")) if self._draining.is_set() else (_CLIENT_LEFT, None)
        if engine.held is None:
            return 503, _error("the engine holds no weights yet")
        rid, future = engine.submit(request)
        if request.rid is not None:
            self._engine_ids.setdefault(request.rid, set()).add(rid)
        try:
            if not await _unless_client_leaves(future, receive):
                engine.abort(rid)
                return _CLIENT_LEFT, None
        finally:
            if request.rid is not None:
                self._engine_ids[request.rid].discard(rid)
                if not self._engine_ids[request.rid]:
                    del self._engine_ids[request.rid]
        finished = future.result()
        if not all(map(math.isfinite, finished.logprobs)):
            return 500, _error("the model's logits are not finite")
        reply = _reply(request, rid, finished)
        if self._draining.is_set() and finished.finish_reason["type"] == "abort":
            reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "handed over: the engine is draining"}
        return 200, reply

    async def _wait_for_version(self, engine: Engine, request: Request, receive: Receive) -> bool:
        """Whether the weights are new enough: False when the client has left or the engine drains before."""
        assert request.min_policy_version is not None
        if engine.policy_version is not None and engine.policy_version >= request.min_policy_version:
            return True
        version = asyncio.ensure_future(engine.wait_for_version(request.min_policy_version))
        draining = asyncio.ensure_future(self._draining.wait())
        either = asyncio.ensure_future(asyncio.wait({version, draining}, return_when=asyncio.FIRST_COMPLETED))
        try:
            await _unless_client_leaves(either, receive)
            return version.done()
        finally:
            for task in (either, version, draining):
                task.cancel()

    def _abort(self, data: bytes | None) -> tuple[int, Any]:
        try:
            running = self._engine_ids.get(orjson.loads(data or b"")["rid"], ())
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return 400, _error('send {"rid": "…"}')
        if self.engine is not None:
            for engine_id in running:
                self.engine.abort(engine_id)
        return 200, {}

    async def _control_weights(self, data: bytes | None) -> tuple[int, Any]:
        try:
            seconds = orjson.loads(data or b"")["hold_s"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return 400, _error('send {"hold_s": SECONDS}')
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _LONGEST_HOLD_S:
            return 400, _error(f"hold_s is {seconds!r}; it must be a number from 0 to {_LONGEST_HOLD_S:.0f}")
        self._hold.set(seconds)
        if self.engine is None:
            return 200, {"policy_version": None, "hold_s": seconds}
        await self.engine.settled()  # so that the version that we name is the one that stays
        return 200, {"policy_version": self.engine.policy_version, "hold_s": seconds}

    def _ready(self) -> tuple[int, Any]:
        if self._draining.is_set():
            return 503, _error("the engine is draining")
        if self.engine is None:
            return 503, _error("the engine is starting")
        if self.engine.held is None:
            return 503, _error("the engine holds no weights yet")
        return 200, {}

    def _load(self) -> tuple[int, Any]:
        if self.engine is None:
            return 503, _error("the engine is starting")
        load = self.engine.load
        return 200, {
            "policy_version": self.engine.policy_version,
            "running": load.running,
            "waiting": load.waiting,
            "kv_used_tokens": load.kv_used_tokens,
            "kv_capacity_tokens": load.kv_capacity_tokens,
        }

    def _policy_version(self) -> tuple[int, Any]:
        held = self.engine.held if self.engine else None
        if held is None:
            return 200, {"run_id": None, "policy_version": None, "root_hash": None}
        return 200, {"run_id": held.run_id, "policy_version": held.policy_version, "root_hash": held.root_hash}


def _reply(request: Request, rid: str, finished: Finished) -> dict[str, Any]:
    return {
        "output_ids": finished.token_ids,
        "meta_info": {
            "id": request.rid or rid,
            "finish_reason": finished.finish_reason,
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(finished.token_ids),
            "cached_tokens": finished.cached_tokens,
            "output_token_logprobs": [
                (logprob, token, None) for logprob, token in zip(finished.logprobs, finished.token_ids, strict=True)
            ],
            "policy_versions": finished.spans,
            "extra_key": finished.namespace,
        },
    }


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


async def _unless_client_leaves(future: asyncio.Future[Any], receive: Receive) -> bool:
    """Whether the future is done: False when the client has left before."""
    await asyncio.wait([future], timeout=_UNWATCHED_S)
    if future.done():
        return True
    left = asyncio.ensure_future(_client_leaves(receive))
    try:
        await asyncio.wait([future, left], return_when=asyncio.FIRST_COMPLETED)
        return future.done()
    finally:
        left.cancel()


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read(receive: Receive) -> bytes | None:
    """The request's body; None when the client has left."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _send(send: Send, status: int, body: Any, *, content_type: bytes = _JSON) -> None:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    headers = [(b"content-type", content_type), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
