"""A service as a child process: started, started again when it dies, stopped with all that it started itself.

Its output goes to one log file. Exit code 2 says that the user got something wrong: starting again would not help.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import Process as Child
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

USER_ERROR = 2

_MOST_RESTARTS = 5
_FIRST_BACKOFF_S = 0.5
_LONG_LIFE_S = 60.0  # a process that lived so long starts with a clean record


@dataclass(frozen=True)
class Command:
    """What to run. `grace_s`: seconds from SIGTERM to SIGKILL. `ends`: its exit with 0 is no failure but its end.
    `environment`: variables that it gets unless the launcher has them."""

    name: str
    arguments: tuple[str, ...]
    log: Path
    grace_s: float
    ends: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


class Process:
    """Runs one command until it is stopped, ends or keeps failing."""

    def __init__(self, command: Command, *, report: Callable[[str], None], started: Callable[[], None]):
        """`report` gets lines for people, `started` is called after each start."""
        self.command = command
        self.restarts = 0
        self._report, self._started = report, started
        self._child: Child | None = None
        self._log_start = 0
        self._stopping = asyncio.Event()

    async def keep_running(self) -> int:
        """Starts the command, again and again with growing pauses when it dies.

        Returns:
            the last exit code, once it was stopped, ended (`ends`), made a user error, or failed too often in a row.
        """
        failures = 0
        while True:
            began = asyncio.get_running_loop().time()
            code = await self._run_once()
            if self._stopping.is_set() or code == USER_ERROR or (code == 0 and self.command.ends):
                return code
            lived = asyncio.get_running_loop().time() - began
            failures = 1 if lived > _LONG_LIFE_S else failures + 1
            if failures > _MOST_RESTARTS:
                return code
            self.restarts += 1
            self._report(f"{self.command.name} {describe(code)}; starting it again ({failures} of {_MOST_RESTARTS})")
            try:
                async with asyncio.timeout(_FIRST_BACKOFF_S * 2 ** (failures - 1)):
                    await self._stopping.wait()
                return code
            except TimeoutError:
                pass

    async def stop(self) -> None:
        """Sends SIGTERM, after the command's grace SIGKILL, and returns when nothing of it is left."""
        self._stopping.set()
        child = self._child
        if child is None or child.returncode is not None:
            return
        _signal_group(child.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(self.command.grace_s):
                await child.wait()
        except TimeoutError:
            self._report(f"{self.command.name} did not stop within {self.command.grace_s:.0f} s; killing it")
        _signal_group(child.pid, signal.SIGKILL)
        await child.wait()

    @property
    def pid(self) -> int | None:
        """Of the running child; None when there is none."""
        return self._child.pid if self._child and self._child.returncode is None else None

    def errors(self) -> list[str]:
        """What the child printed as a user's errors since its last start."""
        with self.command.log.open(errors="replace") as log:
            log.seek(self._log_start)
            return [line.strip().removeprefix("error: ") for line in log if line.startswith("error: ")]

    async def _run_once(self) -> int:
        self.command.log.parent.mkdir(parents=True, exist_ok=True)
        with self.command.log.open("ab") as log:
            self._log_start = log.tell()
            # In a session of its own, so that Ctrl-C reaches the launcher alone and the group can be killed whole.
            self._child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headrace.child", str(os.getpid()), *self.command.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self.command.environment, **os.environ},
                start_new_session=True,
            )
        self._started()
        if self._stopping.is_set():  # stop() came before there was anything to signal
            _signal_group(self._child.pid, signal.SIGKILL)
        code = await self._child.wait()
        _signal_group(self._child.pid, signal.SIGKILL)
        return code


def describe(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
