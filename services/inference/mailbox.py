"""What enters and leaves the scheduler thread.

Our own requests and commands enter through `put`, from any thread; the stock API's come over its socket. The scheduler
takes them between two steps. Finished requests of our own leave through `deliver`, those of the stock API go on to its
detokenizer. Nothing blocks but `wait`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable
from typing import Any

import zmq
from sgl_jax.srt.managers.io_struct import BatchTokenIDOut
from sgl_jax.srt.server_args import PortArgs

from services.inference.request import Request


@dataclasses.dataclass(frozen=True)
class Generate:
    """Command: sample. `rid` is the engine's own id of the request."""

    rid: str
    request: Request


@dataclasses.dataclass(frozen=True)
class Abort:
    """Command: end a request early, or all of them; each still delivers what it sampled."""

    rid: str | None


@dataclasses.dataclass(frozen=True)
class Swap:
    """Command: sample with a staged version from the next step on."""

    version: int


class Stopped(Exception):
    """Nothing will come any more."""


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


class Mailbox:
    """The queue in front of the scheduler, and its ways out."""

    def __init__(self, ports: PortArgs, deliver: Callable[[list[Finished]], None], *, seed: int):
        self.deliver = deliver
        self.seed = seed
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
        """Hands the scheduler a command; from any thread."""
        self._inbox.put(item)

    def take(self) -> list[Any]:
        """What has come, oldest first."""
        items, self._next = self._next, []
        with contextlib.suppress(queue.Empty):
            while True:
                items.append(self._inbox.get_nowait())
        return items

    def wait(self, timeout_s: float) -> None:
        """Blocks until something comes, at the longest for `timeout_s` seconds."""
        with contextlib.suppress(queue.Empty):
            self._next.append(self._inbox.get(timeout=timeout_s))

    def send_stock(self, result: Any) -> None:
        """Passes on what the scheduler has for the stock API."""
        socket = self._to_detokenizer if isinstance(result, BatchTokenIDOut) else self._to_tokenizer
        socket.send_pyobj(result)

    def _forward_stock_requests(self) -> None:
        while True:
            self._inbox.put(self._from_tokenizer.recv_pyobj())
