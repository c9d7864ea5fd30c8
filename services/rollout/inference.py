"""Client and router of engines: tokens go in, sampled tokens with their logprobs and versions come out.

An episode opens a `Context`, appends what it observes and samples actions; each sampled token joins the context. A
context stays with one engine, which holds its prefix, as long as that engine is ready; a new one goes to the ready
engine with the fewest contexts. `sample` waits while no engine is ready, so services may start in any order, and it
retries what another try can mend:

    reply                                    what happens
    200                                      checked; an inconsistent body counts as a failed attempt
    200 that the engine aborted              its tokens are kept and any engine goes on from them; an attempt
    503, 429, connection refused             another engine, or later; not an attempt
    500, cut or silent connection, garbage   again, elsewhere if there is an elsewhere; an attempt
    other 4xx                                EngineError at once: the request is wrong

The version of a token is what the engine's reply says of it, never what this process knows of an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
from yarl import URL

from headrace.v1 import trajectory_pb2 as pb
from services.rollout import lookup, metrics
from services.rollout.sample import BadReply, Sample, joined, read_reply

log = logging.getLogger(__name__)

_KEEPALIVE_S = 3.0  # below the 5 s after which an engine's server cuts an idle connection
_PROBE_TIMEOUT_S = 10.0
_PROBE_PERIOD_S = 5.0  # of a ready engine; one that is not ready is asked sooner
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 2.0
_ABORT_TIMEOUT_S = 2.0
_HEADERS = {"Content-Type": "application/json"}


class EngineError(Exception):
    """No engine will answer this request, in one line."""


class Context:
    """The tokens of one episode, as engines see them. Made by `Engines.context`."""

    def __init__(
        self,
        engines: Engines,
        name: str,
        *,
        temperature: float,
        stop_token_ids: Sequence[int],
        min_policy_version: int,
    ):
        self.length = 0
        self.min_policy_version = min_policy_version
        self.stop_token_ids = stop_token_ids
        self.engine: Engine | None = None
        self.trouble = ""  # why `sample` has not returned yet, where something is wrong
        self.extra_key = ""  # the prefix namespace that the first reply names; later turns stay in it
        self._engines = engines
        self._name = name
        self._calls = itertools.count()
        self._tokens: list[str] = []  # JSON pieces: each token is formatted once, not once a turn
        self._sampling = (
            f'"temperature":{json.dumps(temperature)},"stop_token_ids":{json.dumps(list(stop_token_ids))}}}'
            f',"return_logprob":true,"min_policy_version":{min_policy_version}'
        )

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

    def request(self, max_new_tokens: int) -> tuple[str, bytes]:
        """(request id, body) of a call that samples from here."""
        rid = f"{self._name}-{next(self._calls)}"
        key = f',"extra_key":{json.dumps(self.extra_key)}' if self.extra_key else ""
        text = (
            f'{{"input_ids":[{",".join(self._tokens)}],"sampling_params":{{"max_new_tokens":{max_new_tokens},'
            f'{self._sampling},"rid":{json.dumps(rid)}{key}}}'
        )
        return rid, text.encode()


@dataclasses.dataclass(eq=False)
class Engine:
    """One engine as this gateway sees it."""

    url: str
    ready: bool = False
    contexts: int = 0  # open contexts that stay with it
    running: int = 0  # calls it is answering
    policy_version: int = 0  # in its last reply
    suspected: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        root = URL(self.url)
        self.generate, self.readiness, self.abort = root / "generate", root / "ready", root / "abort_request"


class Engines:
    """The engines of a run. Use it as an async context manager; everything it starts ends with it."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timeout_s: float,
        attempts: int,
        vocabulary_size: int,
        resolve: Callable[[str], Awaitable[frozenset[str]]] = lookup.resolve,
        lookup_period_s: float = 5.0,
    ):
        self._names = [address for address in addresses if lookup.is_name(address)]
        fixed = [address for address in addresses if address not in self._names]
        # Those of fixed addresses; others join and leave as names are looked up.
        self.engines = [Engine(address if "://" in address else f"http://{address}") for address in fixed]
        self._resolve, self._lookup_period_s = resolve, lookup_period_s
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._vocabulary_size = vocabulary_size
        self._readiness = asyncio.Condition()
        self._exit = contextlib.AsyncExitStack()
        self._session: aiohttp.ClientSession
        self._tasks: asyncio.TaskGroup
        self._followers: list[asyncio.Task[None]] = []
        self._probes: dict[Engine, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        self._session = await self._exit.enter_async_context(
            aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None),
                headers=_HEADERS,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        )
        self._tasks = await self._exit.enter_async_context(asyncio.TaskGroup())
        for engine in self.engines:
            self._probes[engine] = self._tasks.create_task(self._watch(engine))
        self._followers = [self._tasks.create_task(self._follow(name)) for name in self._names]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in (*self._followers, *self._probes.values()):
            task.cancel()
        await self._exit.__aexit__(kind, error, trace)

    @contextlib.contextmanager
    def context(
        self, name: str, *, temperature: float, stop_token_ids: Sequence[int], min_policy_version: int
    ) -> Iterator[Context]:
        """An empty context for one episode; `name` is unique and begins its request ids."""
        context = Context(
            self,
            name,
            temperature=temperature,
            stop_token_ids=stop_token_ids,
            min_policy_version=min_policy_version,
        )
        try:
            yield context
        finally:
            self._attach(context, None)

    @property
    def ready(self) -> bool:
        """Whether some engine is ready."""
        return any(engine.ready for engine in self.engines)

    async def wait_ready(self) -> None:
        """Returns as soon as some engine is ready."""
        if not self.ready:
            async with self._readiness:
                await self._readiness.wait_for(lambda: self.ready)

    async def _sample(self, context: Context, max_new_tokens: int) -> Sample:
        parts: list[Sample] = []
        sampled, failures = 0, 0
        avoided: Engine | None = None
        while True:
            if not self.ready:
                context.trouble = "no engine is ready"
                await self.wait_ready()
            engine = self._choose(context, avoided)
            try:
                part, extra_key = await self._call(engine, context, max_new_tokens - sampled)
            except _Unavailable:
                context.trouble = f"{engine.url} takes no requests"
                await self._set_ready(engine, False)
                engine.suspected.set()
                continue
            except _Failed as error:
                failures += 1
                context.trouble = f"{failures} calls failed, the last at {engine.url}: {error}"
                if failures >= self._attempts:
                    raise EngineError(context.trouble) from error
                avoided = engine
                await asyncio.sleep(_backoff_s(failures))
                continue
            context.trouble = ""
            context.extra_key = context.extra_key or extra_key
            context.append(part.token_ids)
            parts.append(part)
            sampled += len(part.token_ids)
            metrics.sampled_tokens.inc(len(part.token_ids))
            if part.finish_reason != pb.FINISH_REASON_ABORT:
                return joined(parts, part.finish_reason)
            if sampled == max_new_tokens:
                return joined(parts, pb.FINISH_REASON_LENGTH)
            failures += 1
            if failures >= self._attempts:
                raise EngineError(f"{failures} calls failed, the last was aborted by {engine.url}")
            avoided = engine
            await asyncio.sleep(_backoff_s(failures))

    def _choose(self, context: Context, avoided: Engine | None) -> Engine:
        """The engine that holds the context's prefix, else the ready one with the fewest contexts."""
        held = context.engine
        if held is not None and held.ready and held is not avoided:
            return held
        ready = [engine for engine in self.engines if engine.ready]
        others = [engine for engine in ready if engine is not avoided]
        chosen = min(others or ready, key=lambda engine: (engine.contexts, engine.running))
        self._attach(context, chosen)
        return chosen

    @staticmethod
    def _attach(context: Context, engine: Engine | None) -> None:
        if context.engine is not None:
            context.engine.contexts -= 1
        if engine is not None:
            engine.contexts += 1
        context.engine = engine

    async def _call(self, engine: Engine, context: Context, max_new_tokens: int) -> tuple[Sample, str]:
        """One call and its deadline. Returns a checked sample and the prefix namespace that it was sampled in."""
        rid, body = context.request(max_new_tokens)
        engine.running += 1
        outcome = "failed"
        try:
            async with asyncio.timeout(self._timeout_s):
                status, data = await self._post(engine.generate, body)
            if status == 200:
                sample, extra_key = read_reply(
                    data,
                    max_new_tokens=max_new_tokens,
                    min_policy_version=context.min_policy_version,
                    vocabulary_size=self._vocabulary_size,
                    stop_token_ids=context.stop_token_ids,
                )
                outcome = "aborted" if sample.finish_reason == pb.FINISH_REASON_ABORT else "ok"
                if sample.version_spans:
                    engine.policy_version = sample.version_spans[-1][0]
                return sample, extra_key
            if status in (503, 429):
                outcome = "unavailable"
                raise _Unavailable
            if status < 500:
                outcome = "refused"
                raise EngineError(f"{engine.url} refused the request with {status}: {_message(data)}")
            raise _Failed(f"{status}: {_message(data)}")
        except aiohttp.ClientConnectorError as error:
            outcome = "unavailable"
            raise _Unavailable from error
        except TimeoutError as error:
            outcome = "timeout"
            engine.suspected.set()
            self._abort(engine, rid)
            raise _Failed(f"no reply within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            engine.suspected.set()
            raise _Failed(f"{type(error).__name__}: {error}") from error
        except BadReply as error:
            outcome = "garbage"
            raise _Failed(f"inconsistent reply: {error}") from error
        except asyncio.CancelledError:
            outcome = "cancelled"
            self._abort(engine, rid)
            raise
        finally:
            engine.running -= 1
            metrics.engine_calls.labels(outcome).inc()

    async def _post(self, url: URL, body: bytes) -> tuple[int, bytes]:
        async with self._session.post(url, data=body) as response:
            return response.status, await response.read()

    def _abort(self, engine: Engine, rid: str) -> None:
        """Frees the engine of a request that nobody waits for, if it can be told; the caller does not wait."""

        async def tell() -> None:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(_ABORT_TIMEOUT_S):
                    await self._post(engine.abort, json.dumps({"rid": rid}).encode())

        self._tasks.create_task(tell())

    async def _follow(self, name: str) -> None:
        """Keeps `engines` true to what a name resolves to. Calls that run at a host that leaves may end there."""
        known: dict[str, Engine] = {}
        while True:
            # A name that does not resolve tells nothing: its engines' readiness does.
            hosts = await self._resolve(name) or known.keys()
            for host in hosts - known.keys():
                engine = known[host] = Engine(f"http://{host}")
                self.engines.append(engine)
                self._probes[engine] = self._tasks.create_task(self._watch(engine))
            for host in known.keys() - hosts:
                engine = known.pop(host)
                self.engines.remove(engine)
                self._probes.pop(engine).cancel()
                await self._set_ready(engine, False)
            await asyncio.sleep(self._lookup_period_s if known else _FIRST_DELAY_S)

    async def _watch(self, engine: Engine) -> None:
        """Keeps `ready` true to the engine's own word; asks at once when a call failed, then ever more seldom."""
        delay_s = _FIRST_DELAY_S
        while True:
            engine.suspected.clear()
            await self._set_ready(engine, await self._probe(engine))
            if engine.ready:
                try:
                    async with asyncio.timeout(_PROBE_PERIOD_S):
                        await engine.suspected.wait()
                except TimeoutError:
                    delay_s = _FIRST_DELAY_S
                    continue
            if engine.ready:
                await asyncio.sleep(_FIRST_DELAY_S)
            else:
                await asyncio.sleep(delay_s * random.uniform(0.5, 1))
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    async def _probe(self, engine: Engine) -> bool:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S), self._session.get(engine.readiness) as response:
                await response.read()
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _set_ready(self, engine: Engine, ready: bool) -> None:
        if engine.ready == ready:
            return
        engine.ready = ready
        log.info("engine %s is %s", engine.url, "ready" if ready else "not ready")
        metrics.ready_engines.set(sum(engine.ready for engine in self.engines))
        async with self._readiness:
            self._readiness.notify_all()


class _Unavailable(Exception):
    """The engine takes no requests now."""


class _Failed(Exception):
    """The call failed in a way that another may not."""


def _message(data: bytes) -> str:
    """One line of an error body."""
    try:
        body: Any = json.loads(data)
        text = str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = data[:200].decode(errors="replace")
    return " ".join(text.split())[:200]


def _backoff_s(failures: int) -> float:
    return min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (failures - 1)) * random.uniform(0.5, 1)
