"""Functions for worker processes: each blocks, fails or dies in its own way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


class Sour(Exception):
    """No pickle carries it: its constructor wants what its arguments do not hold."""

    def __init__(self, *, acidity: int):
        super().__init__(f"acidity {acidity}")


def double(number: int) -> int:
    print("noise on standard output")
    return 2 * number


def process_id(_: object = None) -> int:
    return os.getpid()


def read_input() -> str:
    return sys.stdin.read()


def hang(record: str) -> None:
    """Notes its process and that of a child, then never returns; signals that can be ignored are."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(record).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def wait_for(path: str) -> str:
    """Returns when the file exists."""
    while not os.path.exists(path):
        time.sleep(0.01)
    return path


def fail(text: str) -> None:
    raise LookupError(text)


def sour() -> None:
    raise Sour(acidity=7)


def late() -> None:
    raise TimeoutError("the function's own")


def leave() -> None:
    sys.exit(3)


def crash() -> None:
    os._exit(3)


def unpicklable() -> threading.Lock:
    return threading.Lock()
