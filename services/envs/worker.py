"""The worker process of services.envs.blocking: calls in on standard input, results out on what was standard output.

Each call is answered twice: with nothing when its function has been found and starts, then with (True, result) or
(False, exception). Frames are an 8-byte little-endian length and that many bytes.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from typing import Any, BinaryIO

from headrace.child import die_with_parent


def main(parent: int) -> None:
    """Answers calls until standard input ends, which ends this process and all that it started."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")  # not inherited by what a function starts
    os.dup2(2, 1)  # what a function prints is no reply
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests,), daemon=True).start()
    while True:
        request = requests.get()
        try:
            function, arguments = pickle.loads(request)
        except BaseException as error:  # noqa: BLE001 - importing somebody's module may raise anything
            _send(replies, b"")
            _send(replies, _raised(error))
            continue
        _send(replies, b"")
        try:
            reply = pickle.dumps((True, function(*arguments)))
        except BaseException as error:  # noqa: BLE001 - SystemExit too: the caller decides what it means
            reply = _raised(error)
        _send(replies, reply)


def _receive(requests: queue.SimpleQueue[bytes]) -> None:
    source = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # a function that reads its input must not eat the next call
    while True:
        header = source.read(8)
        body = source.read(int.from_bytes(header, "little")) if len(header) == 8 else b""
        if not body:
            os.killpg(0, signal.SIGKILL)
        requests.put(body)


def _raised(error: BaseException) -> bytes:
    """The exception, with its traceback as a note; one that no pickle carries as a RuntimeError with its text."""
    where = "".join(traceback.format_tb(error.__traceback__)[1:]).rstrip()
    carried: Any = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
    try:
        pickle.loads(pickle.dumps(carried))
    except Exception:  # noqa: BLE001
        carried = RuntimeError(f"{type(error).__name__}: {error}")
    if where:
        carried.add_note(f"in the worker process:\n{where}")
    return pickle.dumps((False, carried))


def _send(replies: BinaryIO, reply: bytes) -> None:
    try:
        replies.write(len(reply).to_bytes(8, "little") + reply)
        replies.flush()
    except BrokenPipeError:
        sys.exit(0)
