"""The engine: SGLang-JAX in this process, as the rest of the service sees it.

`Engine.start` builds the model with empty weights, compiles every shape that serving needs and starts the scheduler's
thread. `submit` hands a tokenized request to that thread and returns a future of what it delivers; nothing in between
is tokenized or detokenized. `install` stages a version in a worker thread, while the engine serves, and swaps it in
between two steps. Old and new weights are in memory together for that time.

Only this file, scheduler.py, staging.py and sglang_jax_fixes.py know SGLang-JAX's insides.

On a TPU (`inference.device: tpu`) the same process runs the engine's own kernels (`--attention-backend fa`) and its own
precompilation, with `inference.page_size` as given (128 or more is usual there); tensor parallelism comes from
`inference.tensor_parallel`. That path follows the engine's documentation; no test covers it, for want of a TPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import jax
from sgl_jax.srt.entrypoints import http_server
from sgl_jax.srt.managers.detokenizer_manager import DetokenizerManager
from sgl_jax.srt.managers.schedule_batch import ForwardMode
from sgl_jax.srt.managers.template_manager import TemplateManager
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager
from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch
from sgl_jax.srt.sampling.sampling_batch_info import SamplingMetadata
from sgl_jax.srt.server_args import PortArgs, ServerArgs

from headrace.config import Config
from headrace.errors import StartupError
from services.inference import sglang_jax_fixes, staging
from services.inference.compilation import compilations
from services.inference.mailbox import Abort, Finished, Generate, Mailbox, Swap
from services.inference.request import Request
from services.inference.scheduler import OWN, VersionedScheduler, random_seed
from services.inference.weights import Hold, Version

log = logging.getLogger(__name__)

_RESERVE_TOKENS = 6  # the engine keeps so many of a request's context for itself


@dataclasses.dataclass(frozen=True)
class Load:
    """What the engine is doing."""

    running: int
    waiting: int
    kv_used_tokens: int
    kv_capacity_tokens: int


class Engine:
    """A running engine. `held` is the version that it samples with; None before the first."""

    def __init__(self, scheduler: VersionedScheduler, mailbox: Mailbox, config: Config):
        self.held: Version | None = None
        self.vocabulary_size: int = scheduler.model_config.vocab_size
        self.longest_prompt = config.inference.context_length - _RESERVE_TOKENS - 1
        self.longest_request = config.inference.context_length - 2
        self._scheduler, self._mailbox = scheduler, mailbox
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._futures: dict[str, asyncio.Future[Finished]] = {}
        self._swapped = asyncio.Condition()
        self._swapping = asyncio.Lock()

    @classmethod
    async def start(
        cls, config: Config, *, died: Callable[[str], None]
    ) -> tuple[Engine, Callable[[], contextlib.AbstractAsyncContextManager[Any]]]:
        """Builds the engine in a worker thread, which takes seconds to minutes.

        Args:
            config: the run.
            died: called, from any thread, with the reason when the engine can serve no more.

        Returns:
            the engine, and an opener of the stock HTTP application, to be entered in the event loop.

        Raises:
            StartupError: the model folder cannot be served.
        """
        compilations()
        sglang_jax_fixes.install(without=() if config.inference.device == "cpu" else sglang_jax_fixes.CPU_ONLY)
        server_args = _server_args(config)
        ports = PortArgs.init_new(server_args)
        holder: list[Engine] = []
        loop = asyncio.get_running_loop()

        def deliver(finished: list[Finished]) -> None:
            loop.call_soon_threadsafe(holder[0]._deliver, finished)

        mailbox = Mailbox(ports, deliver, seed=random_seed())

        def build() -> VersionedScheduler:
            scheduler = VersionedScheduler(server_args, ports, mailbox, update=config.inference.update, died=died)
            _warm_up(scheduler)
            return scheduler

        try:
            scheduler = await asyncio.to_thread(build)
        except (ValueError, KeyError, OSError, AttributeError) as error:
            log.exception("the engine cannot be built")
            raise StartupError(
                f"the engine cannot serve {config.model_path}: {' '.join(str(error).split())}; see the log above"
            ) from error
        engine = cls(scheduler, mailbox, config)
        holder.append(engine)
        scheduler.start()
        return engine, lambda: _stock_application(server_args, ports, scheduler, died)

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
        runner = self._scheduler.tp_worker.worker.model_runner
        self._scheduler.staged[version.policy_version] = await asyncio.to_thread(staging.stage, runner, version.tensors)
        staged_s = time.monotonic()
        while True:
            if self.held is not None:
                await hold.ended()
            async with self._swapping:
                if self.held is not None and hold.remaining_s:
                    continue  # it has begun while another swap ended
                free_s = time.monotonic()
                await self._swap(version)
                return staged_s - start_s, time.monotonic() - free_s

    async def settled(self) -> None:
        """Returns when no swap is under way: a hold that was set before holds from then on."""
        async with self._swapping:
            pass

    async def _swap(self, version: Version) -> None:
        swapped = self._loop.create_future()

        def tell(_: int) -> None:
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


def _server_args(config: Config) -> ServerArgs:
    inference = config.inference
    tpu = inference.device == "tpu"
    # XLA for CPU compiles a batch of one to a program that copies the whole cache: 3.7 ms a step instead of 1.1.
    smallest = 2 if inference.device == "cpu" else 1
    chunk = inference.prefill_chunk_tokens
    arguments = ServerArgs(
        model_path=str(config.model_path),
        load_format="dummy",
        dtype=inference.dtype,
        device=inference.device,
        context_length=inference.context_length,
        max_running_requests=inference.max_running_requests,
        max_total_tokens=inference.kv_cache_tokens,
        chunked_prefill_size=chunk,
        max_prefill_tokens=max(chunk, inference.context_length),
        precompile_bs_paddings=sorted({max(smallest, size) for size in inference.batch_buckets}),
        precompile_token_paddings=[size for size in (64, 256, 1024, 4096) if size < chunk] + [chunk],
        page_size=inference.page_size,
        tp_size=inference.tensor_parallel,
        device_indexes=list(range(inference.tensor_parallel)),
        disable_radix_cache=not inference.prefix_cache,
        attention_backend="fa" if tpu else "native",
        random_seed=inference.seed,
        enable_deterministic_sampling=True,
        disable_overlap_schedule=True,
        disable_precompile=True,
        enable_single_process=True,
        grammar_backend="none",
        stream_interval=1,
        log_level="warning",
    )
    arguments.check_server_args()
    return arguments


def _warm_up(scheduler: VersionedScheduler) -> None:
    """Compiles every shape that serving needs, so that no request waits for the compiler."""
    worker = scheduler.tp_worker
    if jax.default_backend() == "tpu":
        worker.run_precompile()
    else:
        for shape in _shapes(scheduler):
            _compile(worker, scheduler.mesh, shape)
    # Precompilation takes seeds from here; requests must not, or all without one would share the same.
    os.environ["SGLANG_ENABLE_DETERMINISTIC_SAMPLING"] = "0"


class _Shape(NamedTuple):
    mode: ForwardMode
    batch: int  # requests, padded
    tokens: int  # new tokens, padded
    slots: int  # key slots


def _shapes(scheduler: VersionedScheduler) -> list[_Shape]:
    """Every program that serving needs."""
    worker = scheduler.tp_worker
    tokens, batches, slots = worker.get_precompile_paddings()
    longest, per_request = slots[-1], slots[-1] // batches[-1]
    decode = {sglang_jax_fixes.decode_keys(length, per_request) for length in range(1, per_request + 1)}
    most = min(longest, scheduler.max_total_num_tokens)
    if scheduler.server_args.disable_radix_cache:
        most = min(most, tokens[-1] + per_request)  # nothing but one request's earlier chunks precedes new tokens
    prefill = {sglang_jax_fixes.prefill_keys(length, longest) for length in range(1, most + 1)}
    return [
        *(
            _Shape(ForwardMode.EXTEND, worker.max_padded_batch_size, new, keys)
            for new in tokens
            for keys in sorted(prefill)
        ),
        *(_Shape(ForwardMode.DECODE, size, size, size * keys) for size in batches for keys in sorted(decode)),
    ]


def _compile(worker: Any, mesh: jax.sharding.Mesh, shape: _Shape) -> None:
    dummy = worker.compilation_manager._make_dummy_batch(
        shape.batch,
        shape.tokens,
        shape.mode,
        shape.slots,
        dp_size=worker.dp_size,
        per_dp_bs_size=shape.batch // worker.dp_size,
    )
    sampling = SamplingMetadata.from_model_worker_batch(dummy, 0, mesh, worker.model_config.vocab_size)
    dummy.forward_batch = ForwardBatch.init_new(dummy, worker.model_runner)
    worker.forward_batch_generation(dummy, launch_done=None, skip_sample=False, sampling_metadata=sampling)


@contextlib.asynccontextmanager
async def _stock_application(
    server_args: ServerArgs, ports: PortArgs, scheduler: VersionedScheduler, died: Callable[[str], None]
) -> AsyncIterator[Any]:
    """SGLang's own HTTP application (chat completions and the rest), served by this engine."""
    detokenizer = await asyncio.to_thread(DetokenizerManager, server_args, ports)
    threading.Thread(target=detokenizer.event_loop, name="detokenizer", daemon=True).start()
    tokenizer = TokenizerManager(server_args, ports)
    tokenizer.max_req_input_len = scheduler.max_req_input_len
    # Its own start of the loop would also take over this process's signals.
    tokenizer.no_create_loop = True
    templates = TemplateManager()
    templates.initialize_templates(model_path=server_args.model_path)
    http_server.set_global_state(
        http_server._GlobalState(tokenizer_manager=tokenizer, template_manager=templates, scheduler_info={})
    )
    http_server.app.server_args = server_args
    replies = asyncio.create_task(tokenizer.handle_loop())
    replies.add_done_callback(
        lambda task: None if task.cancelled() else died(f"the stock API answers no more: {task.exception()!r}")
    )
    try:
        async with http_server.lifespan(http_server.app):
            yield http_server.app
    finally:
        replies.cancel()
