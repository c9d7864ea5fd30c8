"""OpenAI-compatible HTTP for agents outside: a session is an episode, each completion in it an action of the policy.

    POST   /sessions                    opens one: claims an episode of a ticket, or starts one of its own task
    POST   /v1/chat/completions         a completion, streamed if so asked; `Authorization: Bearer SESSION_ID`
    POST   /sessions/SESSION_ID/v1/chat/completions   the same, for clients that send a key of their own
    POST   /sessions/SESSION_ID/reward  ends the task with a reward, and returns the trajectory
    DELETE /sessions/SESSION_ID         gives it up
    GET    /v1/models                   the one model

Translates to sessions.py and back. A session id is a secret of its agent; it alone lets in to its session. Opening one
needs the run's token where the run has one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import ssl
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web
from google.protobuf.json_format import MessageToDict

from headrace import address
from headrace.rpc import AddressInUse
from headrace.security import Security
from headrace.v1 import trajectory_pb2 as pb
from services.rollout import openai_messages as form
from services.rollout.episode import World, run_episode, sampling_of
from services.rollout.sessions import Agents, AgentSession, Conflict, Ended
from services.rollout.slots import Slots

log = logging.getLogger(__name__)

MODEL = "policy"
_MAX_BODY_BYTES = 64 * 1024 * 1024
_LONGEST_WAIT_S = 60.0
_PURPOSES = {"training": pb.PURPOSE_TRAINING, "evaluation": pb.PURPOSE_EVALUATION}


class _Refused(Exception):
    """A request that is answered with an error of OpenAI's form."""

    def __init__(self, status: int, code: str, message: str):
        self.status, self.code = status, code
        super().__init__(message)


class OpenAiServer:
    """The listener. Use `start`; `stop` ends the episodes that it started itself."""

    def __init__(self, world: World, slots: Slots, *, security: Security, draining: Callable[[], bool]):
        self.port = 0
        self._world, self._slots = world, slots
        self._security, self._draining = security, draining
        self._agents = {name: source for name, source in world.environments.items() if isinstance(source, Agents)}
        self._own: dict[str, asyncio.Task[None]] = {}  # episodes of no ticket, by task
        application = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors])
        application.add_routes(
            [
                web.post("/sessions", self._open),
                web.post("/sessions/{session}/reward", self._reward),
                web.delete("/sessions/{session}", self._delete),
                web.post("/v1/chat/completions", self._complete),
                web.post("/sessions/{session}/v1/chat/completions", self._complete),
                web.get("/v1/models", self._models),
                web.get("/sessions/{session}/v1/models", self._models),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)

    async def start(self, listen: str) -> None:
        """Listens. Raises AddressInUse, and StartupError where it is no address."""
        host, port = address.of_flag("--openai-listen", listen)
        await self._runner.setup()
        context = None
        if self._security.tls and self._security.tls.files:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*self._security.tls.files)
        try:
            await web.TCPSite(self._runner, host, port, ssl_context=context, backlog=4096).start()
        except OSError as error:
            raise AddressInUse(f"--openai-listen {listen} cannot be used ({error.strerror}); choose another") from error
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        for episode in list(self._own.values()):
            episode.cancel()
        await asyncio.gather(*self._own.values(), return_exceptions=True)
        await self._runner.cleanup()

    async def _open(self, request: web.Request) -> web.Response:
        refusal = self._security.refusal(request.headers.get("Authorization"))
        if refusal:
            raise _Refused(401, "unauthorized", refusal)
        if self._draining():
            raise _Refused(503, "draining", "this gateway drains; ask another")
        body = await _body(request)
        agents = self._environment(body.get("environment"))
        purpose = body.get("purpose", "evaluation" if "task" in body else "training")
        if purpose not in _PURPOSES:
            raise _Refused(400, "invalid_request", f"purpose must be one of {sorted(_PURPOSES)}")
        wait_s = _number(body, "wait_s", 10.0)
        if "task" in body:
            session = await self._start(agents, body["task"], purpose)
        else:
            session = await agents.claim(
                lambda task: task.purpose == _PURPOSES[purpose] and task.task_id not in self._own,
                min(max(0.0, wait_s), _LONGEST_WAIT_S),
            )
        if session is None:
            raise _Refused(503, "no_task", f"no {purpose} task of {agents.name} waits for an agent; ask again later")
        return web.json_response(
            {
                "id": session.session_id,
                "api_key": session.session_id,
                "base_url": f"{request.url.origin()}/v1",
                "model": MODEL,
                "environment": agents.name,
                "purpose": purpose,
                "task": {
                    "id": session.task.task_id,
                    "split": session.task.split,
                    "index": session.task.index,
                    "seed": session.task.seed,
                },
            },
            status=201,
        )

    def _environment(self, name: Any) -> Agents:
        if name is None and len(self._agents) == 1:
            return next(iter(self._agents.values()))
        if name not in self._agents:
            known = sorted(self._agents)
            raise _Refused(404, "no_environment", f"environment must be one whose driver is external: {known}")
        return self._agents[name]

    async def _start(self, agents: Agents, wanted: Any, purpose: str) -> AgentSession | None:
        """An episode of its own, which nobody trains on."""
        if purpose == "training":
            raise _Refused(400, "invalid_request", "a task of your own cannot be trained on: leave `task` out")
        if not isinstance(wanted, dict):
            raise _Refused(400, "invalid_request", "task must be an object: {split, index, seed}")
        if not self._slots.free:
            raise _Refused(503, "busy", "every place of this gateway is taken; ask again later")
        task = pb.Task(task_id=f"session-{secrets.token_hex(8)}", environment=agents.name, purpose=_PURPOSES[purpose])
        try:
            task.split = wanted.get("split", agents.settings.split)
            task.index, task.seed = wanted.get("index", 0), wanted.get("seed", 0)
        except (TypeError, ValueError) as error:
            raise _Refused(400, "invalid_request", f"task: {error}") from error
        lease = self._slots.lease(1)

        async def run() -> None:
            now_s = asyncio.get_running_loop().time()
            sampling = sampling_of(task, self._world.settings)
            await run_episode(task, f"{task.task_id}-0", world=self._world, sampling=sampling, queued_s=now_s)

        def done(episode: asyncio.Task[None]) -> None:
            lease.close()
            self._own.pop(task.task_id, None)
            if not episode.cancelled() and (error := episode.exception()):
                log.error("the episode of task %s failed", task.task_id, exc_info=error)

        self._own[task.task_id] = asyncio.create_task(run())
        self._own[task.task_id].add_done_callback(done)
        return await agents.claim(lambda offered: offered.task_id == task.task_id, _LONGEST_WAIT_S)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = await _body(request)
        try:
            messages, tools, ignored = form.read(body)
            completion = await session.complete(messages, tools)
        except form.BadRequest as error:
            raise _Refused(400, "invalid_request", str(error)) from error
        except Conflict as error:
            raise _Refused(409, "conversation_changed", str(error)) from error
        head: dict[str, Any] = {
            "reply_id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": str(body.get("model") or MODEL),
        }
        headers = {"x-headrace-ignored": ",".join(ignored)} if ignored else {}
        if not body.get("stream"):
            return web.json_response(form.reply(completion, **head), headers=headers)
        headers |= {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        for chunk in form.chunks(completion, include_usage=include_usage, **head):
            await response.write(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await _body(request)
        reward = _number(body, "reward", None)
        metrics = body.get("metrics", {})
        if not isinstance(metrics, dict):
            raise _Refused(400, "invalid_request", "metrics must be an object of numbers")
        try:
            trajectory = await session.close(reward, {str(name): _number(metrics, name, None) for name in metrics})
        except Conflict as error:
            raise _Refused(409, "nothing_to_reward", str(error)) from error
        return web.json_response({"trajectory": MessageToDict(trajectory, preserving_proto_field_name=True)})

    async def _delete(self, request: web.Request) -> web.Response:
        self._session(request).abandon()
        return web.json_response({})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "headrace"}]})

    def _session(self, request: web.Request) -> AgentSession:
        session_id = request.match_info.get("session") or request.headers.get("Authorization", "").removeprefix(
            "Bearer "
        )
        for agents in self._agents.values():
            session = agents.find(session_id)
            if session is not None:
                return session
        raise _Refused(401, "no_session", "no such session at this gateway: POST /sessions opens one")


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except _Refused as error:
        return _error(error.status, error.code, str(error))
    except Ended as error:
        return _error(410, "session_over", str(error))


def _error(status: int, code: str, message: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "code": code, "param": None}}, status=status)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read() or b"{}")
    except (ValueError, RecursionError) as error:
        raise _Refused(400, "invalid_request", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _Refused(400, "invalid_request", "the body must be a JSON object")
    return body


def _number(body: dict[str, Any], name: str, default: float | None) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _Refused(400, "invalid_request", f"{name} must be a finite number")
    return float(value)
