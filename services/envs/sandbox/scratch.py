"""Scratch directories on a disk: one for each sandbox, beneath one for each server, which is locked while that lives.

A server that is killed removes nothing. So each that makes its own directory removes those of the dead, whose locks the
kernel has released. It looks at locks and at no process ids, which other containers with the same /tmp count anew.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import subprocess
import tempfile
from pathlib import Path

PREFIX = "sandboxes-"
_LOCK = "lock"
_REMOVE = 'chmod -R u+rwX "$@"; rm -rf -- "$@"'


def make() -> str:
    """An empty directory for one sandbox."""
    return tempfile.mkdtemp(prefix="sandbox-", dir=_of_this_process())


def removal(*paths: str) -> list[str]:
    """The command that removes them. Not Python's rmtree, which gives up where they are locked or thousands deep."""
    return ["/bin/sh", "-c", _REMOVE, "sh", *paths]


def sweep(directory: str) -> list[str]:
    """Removes what dead servers left in a directory; what that was. What is of other users stays."""
    found = []
    for path in Path(directory).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (path / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(str(path))
    if found:
        subprocess.run(removal(*found), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return found


@functools.cache
def _of_this_process() -> str:
    sweep(tempfile.gettempdir())
    path = tempfile.mkdtemp(prefix=PREFIX)
    # Its lock has its name only once it is locked, or another server could take it for a dead one's.
    lock = os.open(f"{path}/new", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(f"{path}/new", f"{path}/{_LOCK}")
    atexit.register(subprocess.run, removal(path), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return path
