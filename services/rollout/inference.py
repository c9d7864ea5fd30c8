"""Client of the engines: tokens go in, sampled tokens with their logprobs and versions come out.

An episode opens a `Context`, appends what it observes and samples actions; each sampled token joins the context.
`sample` waits for a place at an engine (router.py), so services may start in any order, and retries what another try
can mend:

    reply                                    what happens
    200                                      checked; an inconsistent body counts as a failure
    200 that the engine aborted              its tokens are kept, an engine goes on from them; without any, a failure
    503, 429, no connection                  another engine, or later; no failure of the action's, but of the engine's
    500, cut or silent connection, garbage   again, elsewhere if there is an elsewhere; a failure
    other 4xx                                EngineError at once: the request is wrong

An action takes at most `attempts` failures. An engine that fails again and again is left alone for a growing time
(circuit.py). The version of a token is what the engine says of it, never what this process knows of an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import aiohttp

from headrace.security import PLAIN, Security
from headrace.v1 import trajectory_pb2 as pb
from services.rollout import lookup, metrics
from services.rollout.circuit import CircuitLimits
from services.rollout.dialect import CONNECT_S, Call, Dialect, Http, HttpError, Reply
from services.rollout.discovery import Discovery
from services.rollout.engine import Engine
from services.rollout.router import Place, Route, Router
from services.rollout.sample import BadReply, Sample, joined
from services.rollout.sglang import Sglang
from services.rollout.window import WindowLimits

log = logging.getLogger(__name__)

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 2.0
_ABORT_TIMEOUT_S = 2.0
_TIMER_SLACK_S = 0.01  # timers may ring a little early, and the circuit would still be open


class EngineError(Exception):
    """No engine will answer this request, in one line."""


class Context:
    """The tokens of one episode, as engines see them. Made by `Engines.context`."""

    def __init__(self, engines: Engines, name: str, route: Route, *, temperature: float, stop_token_ids: Sequence[int]):
        self.length = 0
        self.route = route
        self.space = ""  # the prefix namespace that the first reply names; later turns stay in it
        self.failure = ""  # of the last call, while `sample` tries again
        self.waiting = False  # for a place at an engine
        self._engines = engines
        self._name = name
        self._calls = itertools.count()
        self._tokens: list[str] = []  # JSON pieces: each token is formatted once, not once a turn
        self._temperature, self._stop_token_ids = temperature, stop_token_ids

    @property
    def engine(self) -> Engine | None:
        """The engine that it stays with."""
        return self.route.engine

    @property
    def trouble(self) -> str:
        """Why `sample` has not returned yet, where something is wrong."""
        return (self.waiting and self._engines.router.trouble) or self.failure

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds observed tokens."""
        if token_ids:
            self._tokens.append(",".join(map(str, token_ids)))
            self.length += len(token_ids)

    async def sample(self, max_new_tokens: int) -> Sample:
        """Samples an action of 1 to max_new_tokens tokens, which joins the context.

        Raises:
            EngineError: the request is wrong, or the attempts are used up.
        """
        with metrics.open_engine_calls.track_inprogress():
            return await self._engines._sample(self, max_new_tokens)

    def call(self, max_new_tokens: int) -> Call:
        """A call that samples from here."""
        return Call(
            rid=f"{self._name}-{next(self._calls)}",
            tokens=",".join(self._tokens),
            max_new_tokens=max_new_tokens,
            temperature=self._temperature,
            stop_token_ids=self._stop_token_ids,
            min_policy_version=self.route.min_policy_version,
            space=self.space,
            vocabulary_size=self._engines.vocabulary_size,
        )


class Engines:
    """The engines of a run. Use it as an async context manager; everything it starts ends with it.

    `affinity`: episodes of a group that gather at one engine for the prefix they share; 0: the load alone decides.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timeout_s: float,
        attempts: int,
        vocabulary_size: int,
        dialect: Dialect | None = None,
        affinity: int = 0,
        window: WindowLimits | None = None,
        circuit: CircuitLimits | None = None,
        resolve: Callable[[str], Awaitable[frozenset[str]]] = lookup.resolve,
        lookup_period_s: float = 5.0,
        security: Security = PLAIN,
        connect_s: float = CONNECT_S,
    ):
        self.vocabulary_size = vocabulary_size
        self.router = Router(affinity=affinity)
        self._dialect = dialect or Sglang()
        self._http = Http(security, connect_s=connect_s)
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._discovery = Discovery(
            addresses,
            router=self.router,
            dialect=self._dialect,
            make=lambda url: Engine(url, window or WindowLimits(), circuit or CircuitLimits()),
            resolve=resolve,
            lookup_period_s=lookup_period_s,
            scheme=self._http.scheme,
        )
        self._exit = contextlib.AsyncExitStack()
        self._tasks: asyncio.TaskGroup

    async def __aenter__(self) -> Self:
        await self._exit.enter_async_context(self._http)
        self._tasks = await self._exit.enter_async_context(asyncio.TaskGroup())
        self._discovery.start(self._http, self._tasks)
        metrics.waiting_engine_calls.set_function(lambda: self.router.waiting)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discovery.stop()
        await self._exit.__aexit__(kind, error, trace)

    @contextlib.contextmanager
    def context(
        self,
        name: str,
        *,
        temperature: float,
        stop_token_ids: Sequence[int],
        min_policy_version: int,
        group: str = "",
    ) -> Iterator[Context]:
        """An empty context for one episode; `name` is unique and begins its request ids.

        `group`: equal for episodes that begin with the same prompt.
        """
        route = Route(group or name, min_policy_version)
        try:
            yield Context(self, name, route, temperature=temperature, stop_token_ids=stop_token_ids)
        finally:
            self.router.attach(route, None)

    @property
    def engines(self) -> list[Engine]:
        """Those that there are now."""
        return self.router.engines

    @property
    def ready(self) -> bool:
        """Whether some engine is ready."""
        return any(engine.ready for engine in self.engines)

    async def wait_ready(self) -> None:
        """Returns as soon as some engine is ready."""
        if not self.ready:
            async with self._discovery.ready:
                await self._discovery.ready.wait_for(lambda: self.ready)

    async def _sample(self, context: Context, max_new_tokens: int) -> Sample:
        parts: list[Sample] = []
        left, failures = max_new_tokens, 0
        avoided: Engine | None = None
        while True:
            context.waiting = True
            place = await self.router.enter(context.route, avoided)
            context.waiting = False
            engine = place.engine
            try:
                reply = await self._call(place, context.call(left))
            except _Unavailable:
                metrics.engine_retries.labels("unavailable").inc()
                context.failure = f"{engine.url} takes no requests"
                await self._discovery.set_ready(engine, False)
                engine.suspected.set()
                continue
            except _Failed as error:
                failures += 1
                context.failure = f"{failures} calls failed, the last at {engine.url}: {error}"
                if failures >= self._attempts:
                    raise EngineError(context.failure) from error
                metrics.engine_retries.labels(error.cause).inc()
                avoided = engine
                await asyncio.sleep(_backoff_s(failures))
                continue
            context.failure = ""
            context.space = context.space or reply.space
            part = reply.sample
            context.append(part.token_ids)
            parts.append(part)
            left -= len(part.token_ids)
            metrics.sampled_tokens.inc(len(part.token_ids))
            if part.finish_reason != pb.FINISH_REASON_ABORT:
                return joined(parts, part.finish_reason)
            if not left:
                return joined(parts, pb.FINISH_REASON_LENGTH)
            metrics.engine_retries.labels("aborted").inc()
            avoided = engine
            engine.suspected.set()  # it may be about to stop
            if not part.token_ids:
                failures += 1
                context.failure = f"{failures} calls failed, the last was aborted by {engine.url}"
                if failures >= self._attempts:
                    raise EngineError(context.failure)
                await asyncio.sleep(_backoff_s(failures))

    async def _call(self, place: Place, call: Call) -> Reply:
        """One call and its deadline; tells the engine's circuit how it ended, and gives the place back."""
        engine = place.engine
        outcome = "failed"
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._dialect.generate(self._http, engine.root, call)
            outcome = "aborted" if reply.sample.finish_reason == pb.FINISH_REASON_ABORT else "ok"
            if reply.sample.version_spans:
                engine.policy_version = max(engine.policy_version, reply.sample.version_spans[-1][0])
            return reply
        except HttpError as error:
            if error.status in (503, 429):
                outcome = "unavailable"
                raise _Unavailable from error
            if error.status < 500:
                outcome = "refused"
                raise EngineError(f"{engine.url} refused the request with {error.status}: {error.message}") from error
            raise _Failed(outcome, str(error)) from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            outcome = "unavailable"
            raise _Unavailable from error
        except TimeoutError as error:
            outcome = "timeout"
            engine.suspected.set()
            self._abort(engine, call.rid)
            raise _Failed(outcome, f"no reply within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            outcome = "cut"
            engine.suspected.set()
            raise _Failed(outcome, f"{type(error).__name__}: {error}") from error
        except BadReply as error:
            outcome = "garbage"
            raise _Failed(outcome, f"inconsistent reply: {error}") from error
        except asyncio.CancelledError:
            outcome = "cancelled"
            self._abort(engine, call.rid)
            raise
        finally:
            metrics.engine_calls.labels(outcome).inc()
            self._judge(place, outcome)
            self.router.leave(place)

    def _judge(self, place: Place, outcome: str) -> None:
        """Tells the engine's circuit how a call ended."""
        if outcome == "cancelled":
            return
        circuit, loop = place.engine.circuit, asyncio.get_running_loop()
        if outcome in ("ok", "aborted", "refused"):
            circuit.succeeded(probe=place.probe)
        elif circuit.failed(loop.time(), probe=place.probe):
            log.warning(
                "engine %s is left alone for %.1f s: calls fail (%s)",
                place.engine.url,
                circuit.until_s - loop.time(),
                outcome,
            )
            loop.call_at(circuit.until_s + _TIMER_SLACK_S, self.router.dispatch)

    def _abort(self, engine: Engine, rid: str) -> None:
        """Frees the engine of a request that nobody waits for, if it can be told; the caller does not wait."""

        async def tell() -> None:
            with contextlib.suppress(HttpError, aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(_ABORT_TIMEOUT_S):
                    await self._dialect.abort(self._http, engine.root, rid)

        self._tasks.create_task(tell())


class _Unavailable(Exception):
    """The engine takes no requests now."""


class _Failed(Exception):
    """The call failed in a way that another may not."""

    def __init__(self, cause: str, text: str):
        self.cause = cause
        super().__init__(text)


def _backoff_s(failures: int) -> float:
    return min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (failures - 1)) * random.uniform(0.5, 1)
