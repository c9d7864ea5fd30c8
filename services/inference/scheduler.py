"""The engine's scheduler thread: SGLang-JAX's scheduler with a mailbox instead of sockets, and versions.

Requests and commands enter through the mailbox, from any thread; the scheduler takes them between two steps. Finished
requests of our own route leave through `deliver`, one call a step; those of the stock API go on to its detokenizer.
Nothing blocks but the mailbox, when there is nothing to do.

Versions. A swap is a command, so it happens between two steps, and with overlap scheduling off a step's tokens are
sampled by the weights that are held when its results are processed: `stream_output_generation` stamps them.

Prefix cache. Keys and values are valid only for the weights that computed them, so every request lives in a namespace
of the cache, named by the version that was held when it began to be computed (`namespace`). A first turn gets the
version that is held; one that still waits at a swap moves to the new namespace, for nothing of it has been computed. A
later turn brings the namespace of its first turn and finds its own keys there, which older weights computed: the same
mixture as in a request that runs across a swap. A later turn that brings a version newer than the one held (its episode
began on an engine that is ahead) gets a namespace apart: what old weights compute for it must not be found by first
turns once this engine holds that version. So a first turn only ever finds what its own version computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import zmq
from sgl_jax.srt.managers.communication import CommunicationBackend
from sgl_jax.srt.managers.io_struct import AbortReq, BatchTokenIDOut, TokenizedGenerateReqInput
from sgl_jax.srt.managers.schedule_batch import Req
from sgl_jax.srt.managers.scheduler import Scheduler
from sgl_jax.srt.server_args import PortArgs, ServerArgs

log = logging.getLogger(__name__)

OWN = "headrace-"  # request ids of our own route begin with it
_IDLE_WAIT_S = 1.0
_BUSY_WAIT_S = 0.002


@dataclasses.dataclass(frozen=True)
class Finished:
    """A request of our own route that has ended. `spans` are (policy_version, length) over the tokens."""

    rid: str
    token_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int]]
    finish_reason: dict[str, Any]
    namespace: str
    cached_tokens: int  # of the prompt, found in the prefix cache


class Namespace(str):
    """The part of the prefix cache that a request uses; remembers what the request asked for."""

    asked: str | None


def namespace(asked: str | None, held: int) -> Namespace:
    """Where a request that asks for `asked` looks for prefixes while version `held` is held.

    Args:
        asked: None in a first turn; the version under which the episode started in a later one; else a client's own
            salt (the stock API has one), which stays apart for each version.
        held: the version that is held.
    """
    if asked is None:
        name = str(held)
    elif asked.isascii() and asked.isdecimal():
        name = asked if int(asked) <= held else f"{asked} under {held}"
    else:
        name = f"{held} salted {asked}"
    space = Namespace(name)
    space.asked = asked
    return space


class Mailbox(CommunicationBackend):
    """What enters and leaves the scheduler thread."""

    def __init__(self, ports: PortArgs, deliver: Callable[[list[Finished]], None]):
        self.deliver = deliver
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._next: list[Any] = []
        context = zmq.Context()
        self._to_tokenizer = context.socket(zmq.PUSH)
        self._to_tokenizer.connect(ports.tokenizer_ipc_name)
        self._to_detokenizer = context.socket(zmq.PUSH)
        self._to_detokenizer.connect(ports.detokenizer_ipc_name)
        self._from_tokenizer = context.socket(zmq.PULL)
        self._from_tokenizer.connect(ports.scheduler_input_ipc_name)
        threading.Thread(target=self._forward_stock_requests, name="stock requests", daemon=True).start()

    def put(self, item: Any) -> None:
        """Hands the scheduler a request, an AbortReq or a command (a function); from any thread."""
        self._inbox.put(item)

    def recv_requests(self) -> list[Any]:
        """Requests that have come, oldest first. Runs the commands among them, in the scheduler's thread."""
        items, self._next = self._next, []
        while True:
            try:
                items.append(self._inbox.get_nowait())
            except queue.Empty:
                break
        requests = []
        for item in items:
            if callable(item):
                item()
            else:
                requests.append(item)
        return requests

    def wait_for_new_requests(self, timeout: float = _IDLE_WAIT_S) -> None:
        """Blocks until something comes, at the longest for `timeout` seconds."""
        with contextlib.suppress(queue.Empty):
            self._next.append(self._inbox.get(timeout=timeout))

    def send_pyobj(self, result: Any) -> None:
        """Takes what the scheduler has for others."""
        if isinstance(result, AbortReq) and result.rid.startswith(OWN):
            # It waited still: nothing was sampled.
            reason = {"type": "abort", "message": "Aborted"}
            self.deliver([Finished(result.rid, [], [], [], reason, "", 0)])
        elif isinstance(result, BatchTokenIDOut):
            self._to_detokenizer.send_pyobj(result)
        else:
            self._to_tokenizer.send_pyobj(result)

    def _forward_stock_requests(self) -> None:
        while True:
            self._inbox.put(self._from_tokenizer.recv_pyobj())


class VersionedScheduler(Scheduler):
    """The stock scheduler, with a mailbox, versions and namespaces."""

    def __init__(self, server_args: ServerArgs, ports: PortArgs, mailbox: Mailbox, *, died: Callable[[str], None]):
        self.policy_version = -1  # none yet; nothing is asked of us before the first swap
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self._mailbox = mailbox
        self._died = died
        # Seeds that clients do not give. Different for every request and every process: engines and restarts must not
        # repeat each other's samples.
        self._seed = random.SystemRandom().getrandbits(31)
        super().__init__(server_args, ports, communication_backend=_Waiting(mailbox, self))

    def start(self) -> None:
        """Runs the loop in a thread of its own, for ever."""
        threading.Thread(target=self._run, name="scheduler", daemon=True).start()

    def swap(self, leaves: Sequence[jax.Array], version: int) -> None:
        """Makes `leaves` the model's weights from the next step on. In the scheduler's thread only."""
        self.tp_worker.worker.model_runner.model_state_leaves = list(leaves)
        self.policy_version = version
        for req in [*self.waiting_queue, *self.grammar_queue]:
            if not req.output_ids:
                req.extra_key = namespace(req.extra_key.asked, version)

    def handle_generate_request(self, recv_req: TokenizedGenerateReqInput) -> None:
        recv_req.extra_key = namespace(recv_req.extra_key, self.policy_version)
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
                req.finished_output = True
                finished.append(_finished(req))
        if finished:
            self._mailbox.deliver(finished)
        for with_input in (False, True):  # apart, for together their logprobs go to each other
            alike = [req for req in stock if req.return_logprob == with_input]
            if alike:
                super().stream_output_generation(alike, with_input, not with_input, cache_miss_count=cache_miss_count)

    def watchdog_thread(self) -> None:
        """Ends this process, not its parent, when one step takes longer than the watchdog's time."""
        seen, since = -1, time.monotonic()
        while True:
            time.sleep(min(5.0, self.server_args.watchdog_timeout / 4))
            if self.cur_batch is None or self._engine_paused or self.forward_ct != seen:
                seen, since = self.forward_ct, time.monotonic()
            elif time.monotonic() > since + self.server_args.watchdog_timeout:
                self._died(f"one step has taken more than {self.server_args.watchdog_timeout} s")
                return

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

    def _run(self) -> None:
        try:
            self.event_loop_normal()
        except BaseException as error:
            log.exception("the scheduler has failed")
            self._died(f"the scheduler has failed: {error!r}")


class _Waiting(CommunicationBackend):
    """The mailbox as the loop sees it: waits as long as what the scheduler has to do allows."""

    def __init__(self, mailbox: Mailbox, scheduler: VersionedScheduler):
        self._mailbox, self._scheduler = mailbox, scheduler
        self.send_pyobj = mailbox.send_pyobj  # type: ignore[method-assign]

    def recv_requests(self) -> list[Any]:
        if self._scheduler._engine_paused:
            self._mailbox.wait_for_new_requests(_IDLE_WAIT_S)
        return self._mailbox.recv_requests()

    def wait_for_new_requests(self, timeout: float = 0.0) -> None:
        # Requests that wait although nothing runs wait for a grammar or for memory: look again soon.
        waiting = self._scheduler.waiting_queue or self._scheduler.grammar_queue
        self._mailbox.wait_for_new_requests(_BUSY_WAIT_S if waiting else _IDLE_WAIT_S)

    def send_pyobj(self, result: Any) -> None:
        self._mailbox.send_pyobj(result)


def _finished(req: Req) -> Finished:
    assert req.finished_reason is not None
    length = req.finished_len if req.finished_len is not None else len(req.output_ids)
    spans: list[tuple[int, int]] = []
    left = length
    for version, count in req.version_spans:
        if left > 0:
            spans.append((version, min(count, left)))
        left -= count
    space, token_ids = req.extra_key, req.output_token_logprobs_idx[:length]
    reason = req.finished_reason.to_json()
    if reason["type"] == "length" and token_ids and token_ids[-1] in _stop_tokens(req):
        reason = {"type": "stop", "matched": token_ids[-1]}  # the engine looks at the limit first
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
