"""The engine's scheduler thread: SGLang-JAX's scheduler with commands instead of sockets, and versions.

Requests and commands enter through `Source.take`, between two steps; finished requests of our own route leave through
`Source.deliver`, one call a step; those of the stock API go on to its detokenizer. Nothing blocks but `Source.wait`,
when there is nothing to do.

Versions. A swap is a command, so it happens between two steps, and with overlap scheduling off a step's tokens are
sampled by the weights that are held when its results are processed: `stream_output_generation` stamps them. What a swap
does to running requests is `inference.update`: under `in_place` they go on with the keys that they have; under
`recompute` they go back to the queue, free their keys and are prefilled again, prompt and reply, by the new weights.
What they have sampled keeps its log-probabilities and stamps either way. namespace.py tells who may find whose keys.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from sgl_jax.srt.managers.communication import CommunicationBackend
from sgl_jax.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sgl_jax.srt.managers.schedule_batch import FINISH_ABORT, Req
from sgl_jax.srt.managers.scheduler import Scheduler
from sgl_jax.srt.sampling.sampling_params import SamplingParams
from sgl_jax.srt.server_args import PortArgs, ServerArgs

from services.inference.mailbox import Abort, Finished, Generate, Stopped, Swap
from services.inference.namespace import Update, namespace

log = logging.getLogger(__name__)

OWN = "headrace-"  # request ids of our own route begin with it
_IDLE_WAIT_S = 1.0
_BUSY_WAIT_S = 0.002


class Source(Protocol):
    """Where commands come from, and where results go."""

    seed: int  # of the first request that brings none

    def take(self) -> list[Any]: ...  # raises Stopped when nothing will come any more
    def wait(self, timeout_s: float) -> None: ...
    def deliver(self, finished: list[Finished]) -> None: ...
    def send_stock(self, result: Any) -> None: ...


class VersionedScheduler(Scheduler):
    """The stock scheduler, with commands, versions and namespaces."""

    waiting_queue: list[Req]
    running_batch: Any
    last_batch: Any
    cur_batch: Any

    def __init__(
        self,
        server_args: ServerArgs,
        ports: PortArgs,
        source: Source,
        *,
        update: Update,
        died: Callable[[str], None],
    ):
        self.policy_version = -1  # none yet; nothing is asked of us before the first swap
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self.recomputed_tokens = 0
        self.staged: dict[int, Callable[[], Sequence[jax.Array]]] = {}  # gives a version's leaves, until its swap
        self.swapped: Callable[[], None] = lambda: None  # called in this thread after each swap
        self.ended: Callable[[], None] = lambda: None  # called in this thread when the source ends
        self.source = source
        self._update: Update = update
        self._died = died
        self._seed = source.seed
        self._own: dict[str, Req] = {}
        super().__init__(server_args, ports, communication_backend=_Backend(self))

    def start(self) -> None:
        """Runs the loop in a thread of its own, for ever."""
        threading.Thread(target=self.run, name="scheduler", daemon=True).start()

    def run(self) -> None:
        """Runs the loop until it fails or the source ends."""
        try:
            self.event_loop_normal()
        except Stopped:
            self.ended()
        except BaseException as error:
            log.exception("the scheduler has failed")
            self._died(f"the scheduler has failed: {error!r}")

    def execute(self, item: Any) -> list[Any]:
        """Carries out a command between two steps; what is left of it for the stock scheduler."""
        if isinstance(item, Generate):
            return [_stock_request(item)]
        if isinstance(item, Abort):
            return [AbortReq(rid=item.rid or "", abort_all=item.rid is None)]
        if isinstance(item, Swap):
            self._swap(item.version)
            return []
        return [item]

    def handle_generate_request(self, recv_req: TokenizedGenerateReqInput) -> None:
        recv_req.extra_key = namespace(recv_req.extra_key, self.policy_version, self._update)
        # A batch computes these logprobs only if all its requests want them, then fails on one of ours without.
        recv_req.return_output_logprob_only = not recv_req.return_logprob
        self.prompt_tokens += len(recv_req.input_ids)
        parameters = recv_req.sampling_params
        if parameters.sampling_seed is None:
            self._seed = (self._seed + 1) & 0x7FFFFFFF
            parameters.sampling_seed = self._seed
        super().handle_generate_request(recv_req)

    def stream_output_generation(
        self,
        reqs: list[Req],
        return_logprob: bool,
        return_output_logprob_only: bool,
        skip_reqs: set[int] | Req | None = None,
        cache_miss_count: int | None = None,
    ) -> None:
        skipped = skip_reqs if isinstance(skip_reqs, set) else {id(skip_reqs)}
        finished, stock = [], []
        for req in reqs:
            if id(req) in skipped:
                continue
            self._stamp(req)
            if not req.rid.startswith(OWN):
                stock.append(req)
            elif req.finished() and not req.finished_output:
                finished.append(self._end(req))
        if finished:
            self.source.deliver(finished)
        for with_input in (False, True):  # apart, for together their logprobs go to each other
            alike = [req for req in stock if req.return_logprob == with_input]
            if alike:
                super().stream_output_generation(alike, with_input, not with_input, cache_miss_count=cache_miss_count)

    def abandon(self, rid: str) -> None:
        """Delivers a request of our own that ends outside a batch: aborted while it waits, or out of memory."""
        req = self._own.get(rid)
        if req is not None:
            req.finished_reason = req.finished_reason or FINISH_ABORT()
            req.to_finish = None
            self.source.deliver([self._end(req)])

    def watchdog_thread(self) -> None:
        """Ends this process, not its parent, when one step takes longer than the watchdog's time."""
        seen, since = -1, time.monotonic()
        while True:
            time.sleep(min(5.0, self.server_args.watchdog_timeout / 4))
            if self.cur_batch is None or self.forward_ct != seen:
                seen, since = self.forward_ct, time.monotonic()
            elif time.monotonic() > since + self.server_args.watchdog_timeout:
                self._died(f"one step has taken more than {self.server_args.watchdog_timeout} s")
                return

    def _add_request_to_queue(self, req: Req) -> None:
        if req.rid.startswith(OWN):
            self._own[req.rid] = req
        super()._add_request_to_queue(req)

    def _swap(self, version: int) -> None:
        if self._update == "recompute":
            self._retract_running()
        self.tp_worker.worker.model_runner.model_state_leaves = list(self.staged.pop(version)())
        self.policy_version = version
        for req in [*self.waiting_queue, *self.grammar_queue]:
            if not req.output_ids or self._update == "recompute":
                # Nothing is computed of it, or nothing any more: it may find what the new weights compute.
                req.extra_key = namespace(req.extra_key.asked, version, self._update)
        self.swapped()

    def _retract_running(self) -> None:
        """Sends whatever is being computed back to the front of the queue, without keys.

        The stock pause_generation(mode="retract") forgets requests whose prefill was the last step: they are in
        `last_batch` and join `running_batch` only when the next step is planned. So that is done first.
        """
        waited = self.waiting_queue
        self.waiting_queue = []
        chunked = self._prepare_chunked_reqs_to_exclude()
        self._process_pending_chunked_aborts()
        if self.last_batch is not None and self.last_batch.forward_mode.is_extend():
            self.last_batch.filter_batch(chunked_req_to_exclude=chunked)
            if self.running_batch.is_empty():
                self.running_batch = self.last_batch
            elif not self.last_batch.is_empty():
                self.running_batch.merge_batch(self.last_batch)
        self.running_batch.filter_batch()
        retracted = self.running_batch.retract_all(self.server_args)
        for req in retracted:
            self._add_request_to_queue(req)
        self._retract_parked_chunked_reqs(retracted)
        self.recomputed_tokens += sum(len(req.origin_input_ids) + len(req.output_ids) for req in self.waiting_queue)
        self.waiting_queue += waited
        for info in self.running_batch.reqs_info:
            info.batch_is_full = False
        self.last_batch = self.cur_batch = None

    def _stamp(self, req: Req) -> None:
        spans = req.__dict__.setdefault("version_spans", [])
        new = len(req.output_ids) - sum(length for _, length in spans)
        if new <= 0:
            return
        self.generated_tokens += new
        if spans and spans[-1][0] == self.policy_version:
            spans[-1] = (self.policy_version, spans[-1][1] + new)
        else:
            spans.append((self.policy_version, new))

    def _end(self, req: Req) -> Finished:
        self._own.pop(req.rid, None)
        req.finished_output = True
        return _finished(req)


class _Backend(CommunicationBackend):
    """The source as the stock loop sees it: carries out commands, waits as long as what there is to do allows."""

    def __init__(self, scheduler: VersionedScheduler):
        self._scheduler = scheduler

    def recv_requests(self) -> list[Any]:
        scheduler = self._scheduler
        return [rest for item in scheduler.source.take() for rest in scheduler.execute(item)]

    def wait_for_new_requests(self, timeout: float = 0.0) -> None:
        # Requests that wait although nothing runs wait for a grammar or for memory: look again soon.
        waiting = self._scheduler.waiting_queue or self._scheduler.grammar_queue
        self._scheduler.source.wait(_BUSY_WAIT_S if waiting else _IDLE_WAIT_S)

    def send_pyobj(self, result: Any) -> None:
        if isinstance(result, AbortReq) and result.rid.startswith(OWN):
            self._scheduler.abandon(result.rid)
        else:
            self._scheduler.source.send_stock(result)


def random_seed() -> int:
    """A seed for requests that bring none: engines and restarts must not repeat each other's samples."""
    return random.SystemRandom().getrandbits(31)


def _stock_request(command: Generate) -> TokenizedGenerateReqInput:
    request = command.request
    parameters = SamplingParams(
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        sampling_seed=request.sampling_seed,
    )
    parameters.normalize(None)
    return TokenizedGenerateReqInput(
        rid=command.rid,
        text="",
        input_ids=request.input_ids,
        sampling_params=parameters,
        return_logprob=False,
        return_output_logprob_only=True,
        logprob_start_len=-1,
        top_logprobs_num=0,
        extra_key=request.space,
    )


def _finished(req: Req) -> Finished:
    assert req.finished_reason is not None
    length = req.finished_len if req.finished_len is not None else len(req.output_ids)
    spans: list[tuple[int, int]] = []
    left = length
    for version, count in req.__dict__.get("version_spans", ()):
        if left > 0:
            spans.append((version, min(count, left)))
        left -= count
    space, token_ids = req.extra_key, req.output_token_logprobs_idx[:length]
    reason = req.finished_reason.to_json()
    if reason["type"] in ("length", "abort") and token_ids:
        # The engine looks at the limit, and at an abort, before it looks at the token.
        if token_ids[-1] in _stop_tokens(req):
            reason = {"type": "stop", "matched": token_ids[-1]}
        elif len(token_ids) >= req.sampling_params.max_new_tokens:
            reason = {"type": "length", "length": len(token_ids)}
    return Finished(
        rid=req.rid,
        token_ids=token_ids,
        logprobs=[float(value) for value in req.output_token_logprobs_val[:length]],
        spans=spans,
        finish_reason=reason,
        namespace=space.asked if space.asked is not None else str(space),
        cached_tokens=req.cached_tokens,
    )


def _stop_tokens(req: Req) -> set[int]:
    if req.sampling_params.ignore_eos:
        return set()
    tokens = {*(req.sampling_params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if req.tokenizer is not None:
        tokens |= {req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())}
    return tokens
