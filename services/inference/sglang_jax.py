"""The engine: SGLang-JAX in this process, as the rest of the service sees it.

`Engine.start` builds the model with empty weights, compiles every shape that serving needs and starts the scheduler's
thread. `submit` hands a tokenized request to that thread and returns a future of what it delivers; nothing in between
is tokenized or detokenized. `install` stages a version in a worker thread, while the engine serves, and swaps it in
between two steps. Old and new weights are in memory together for that time.

An engine of several hosts has its `Engine` on the first; `follow` is what the others do (lockstep.py tells how).

Only this file, build.py, scheduler.py, staging.py, warm_up.py, stock.py and sglang_jax_fixes.py know SGLang-JAX's
insides.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from headrace.config import Config
from services.inference import staging
from services.inference.build import build, prepare
from services.inference.compilation import compilations
from services.inference.hosts import Hosts
from services.inference.lockstep import Leader
from services.inference.mailbox import Abort, Finished, Generate, Mailbox, Swap
from services.inference.request import Request
from services.inference.scheduler import OWN, VersionedScheduler, random_seed
from services.inference.stock import stock_application
from services.inference.weights import Hold, Version

_RESERVE_TOKENS = 6  # the engine keeps so many of a request's context for itself

Stock = Callable[[], contextlib.AbstractAsyncContextManager[Any]]


@dataclasses.dataclass(frozen=True)
class Load:
    """What the engine is doing."""

    running: int
    waiting: int
    kv_used_tokens: int
    kv_capacity_tokens: int


class Engine:
    """A running engine. `held` is the version that it samples with; None before the first."""

    def __init__(self, scheduler: VersionedScheduler, mailbox: Mailbox, leader: Leader | None, config: Config):
        self.held: Version | None = None
        self.vocabulary_size: int = scheduler.model_config.vocab_size
        self.longest_prompt = config.inference.context_length - _RESERVE_TOKENS - 1
        self.longest_request = config.inference.context_length - 2
        self._scheduler, self._mailbox, self._leader = scheduler, mailbox, leader
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._futures: dict[str, asyncio.Future[Finished]] = {}
        self._swapped = asyncio.Condition()
        self._swapping = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        died: Callable[[str], None],
        hosts: Hosts = Hosts(),  # noqa: B008 - frozen
        leaving: Callable[[], None] = lambda: None,
    ) -> tuple[Engine, Stock | None]:
        """Builds the engine in a worker thread, which takes seconds to minutes.

        Args:
            config: the run.
            died: called, from any thread, with the reason when the engine can serve no more.
            hosts: the hosts that the engine lies on, of which this is the first.
            leaving: called, from any thread, when another host is told to stop.

        Returns:
            the engine, and an opener of the stock HTTP application, to be entered in the event loop; an engine of
            several hosts has none.

        Raises:
            StartupError: the model folder cannot be served, or a host does not come.
        """
        prepared = prepare(config, hosts)
        holder: list[Engine] = []
        loop = asyncio.get_running_loop()

        def deliver(finished: list[Finished]) -> None:
            loop.call_soon_threadsafe(holder[0]._deliver, finished)

        mailbox = Mailbox(prepared.ports, deliver, seed=random_seed())

        def connect() -> Mailbox | Leader:
            return mailbox if hosts.nodes == 1 else Leader(mailbox, hosts, left=died, leaving=leaving)

        scheduler = await asyncio.to_thread(build, config, prepared, connect=connect, died=died)
        leader = scheduler.source if isinstance(scheduler.source, Leader) else None
        engine = cls(scheduler, mailbox, leader, config)
        holder.append(engine)
        scheduler.start()
        if leader is not None:
            return engine, None
        return engine, lambda: stock_application(prepared.arguments, prepared.ports, scheduler, died)

    @property
    def policy_version(self) -> int | None:
        """The version that is held; None before the first."""
        return None if self.held is None else self.held.policy_version

    @property
    def load(self) -> Load:
        """What it is doing, as a glance from outside its thread sees it."""
        scheduler = self._scheduler
        running = 0 if scheduler.running_batch.is_empty() else scheduler.running_batch.batch_size()
        used, _, _, _ = scheduler._get_token_info()
        return Load(running, len(scheduler.waiting_queue), max(0, used), scheduler.max_total_num_tokens)

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled since start."""
        return self._scheduler.generated_tokens

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests since start, cached ones included."""
        return self._scheduler.prompt_tokens

    @property
    def recomputed_tokens(self) -> int:
        """Tokens of running requests that swaps have sent back to be prefilled again."""
        return self._scheduler.recomputed_tokens

    @property
    def programs(self) -> int:
        """Programs that JAX has built in this process."""
        return compilations().count

    async def wait_for_version(self, at_least: int) -> None:
        """Returns once a version that new is held."""
        if self.held is not None and self.held.policy_version >= at_least:
            return
        async with self._swapped:
            await self._swapped.wait_for(lambda: self.held is not None and self.held.policy_version >= at_least)

    def submit(self, request: Request) -> tuple[str, asyncio.Future[Finished]]:
        """Hands a request to the scheduler.

        Returns:
            the engine's id of the request, and what it will deliver. To cancel the future aborts nothing: `abort` does.
        """
        # The trailing dot: the engine aborts by prefix.
        rid = f"{OWN}{next(self._numbers)}."
        future: asyncio.Future[Finished] = self._loop.create_future()
        self._futures[rid] = future
        self._mailbox.put(Generate(rid, request))
        return rid, future

    def abort(self, rid: str) -> None:
        """Ends a request early; it still delivers what it sampled. Unknown ids are ignored."""
        if rid in self._futures:
            self._mailbox.put(Abort(rid))

    def abort_all(self) -> None:
        """Ends every request early, those of the stock API too; each still delivers what it sampled."""
        self._mailbox.put(Abort(None))

    async def install(self, version: Version, hold: Hold) -> tuple[float, float]:
        """Stages a version, waits for the hold's end and swaps the version in.

        Returns:
            seconds that staging took, and from the hold's end to the version's use.

        Raises:
            StartupError: the tensors do not fit the model.
        """
        start_s = time.monotonic()
        self._scheduler.staged[version.policy_version] = await self._stage(version)
        staged_s = time.monotonic()
        while True:
            if self.held is not None:
                await hold.ended()
            async with self._swapping:
                if self.held is not None and hold.remaining_s:
                    continue  # it has begun since
                free_s = time.monotonic()
                await self._swap(version)
                return staged_s - start_s, time.monotonic() - free_s

    async def settled(self) -> None:
        """Returns when no swap is under way: a hold that was set before holds from then on."""
        async with self._swapping:
            pass

    def stop(self) -> None:
        """Ends the other hosts of this engine."""
        if self._leader is not None:
            self._leader.stop()

    async def _stage(self, version: Version) -> Callable[[], Sequence[jax.Array]]:
        """What gives the version's leaves at its swap."""
        runner = self._scheduler.tp_worker.worker.model_runner
        stage = functools.partial(staging.stage, runner, version.tensors, first=self.held is None)
        if self._leader is not None:
            await asyncio.to_thread(self._leader.send_version, version.policy_version, version.tensors)
            return stage
        leaves = await asyncio.to_thread(stage)
        return lambda: leaves

    async def _swap(self, version: Version) -> None:
        swapped = self._loop.create_future()

        def tell() -> None:
            self._loop.call_soon_threadsafe(swapped.set_result, None)

        self._scheduler.swapped = tell
        self._mailbox.put(Swap(version.policy_version))
        await swapped
        async with self._swapped:
            # The arrays are the engine's now; what remains of the pulled ones can go.
            self.held = dataclasses.replace(version, tensors={})
            self._swapped.notify_all()

    def _deliver(self, finished: list[Finished]) -> None:
        for result in finished:
            future = self._futures.pop(result.rid, None)
            if future is not None and not future.done():
                future.set_result(result)
