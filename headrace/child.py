"""Becomes another program that dies with its parent: `python -m headrace.child PARENT_PID COMMAND…`.

The launcher starts every service through it, so that even `kill -9` of the launcher leaves no process behind. The
request to the kernel must be made in the child itself and outlives exec; making it in a fresh interpreter instead of
between fork and exec keeps it safe beside the launcher's threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    die_with_parent(int(parent))
    os.execvp(command[0], command)


def die_with_parent(parent: int) -> None:
    """Asks the kernel, on Linux, to kill this process when its parent dies; ends it if that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main()
