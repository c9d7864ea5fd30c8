"""Worker processes for code that blocks: bounded, in the order of asking, and killed when it is too late.

    async with Workers(2, name="chess") as workers:
        move = await workers.call(engine.best_move, board, timeout_s=5)

A call waits for a free worker, of which there are at most `size`; a worker is started when a call first needs it and
kept. A call past its deadline, or cancelled, kills its worker with every process that it started, and the next call
starts another: threads cannot be killed, so a hung call in one would be leaked. What the function raises is raised
here, with the worker's traceback as a note. Workers and all that they started die with their server, whatever kills
that: a guard process, which the first worker brings along, then kills their groups.

Functions and arguments travel as pickles, and so do results: a worker is for code that may hang or crash, not for code
that nobody trusts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, cast

from services.envs import metrics

# For the interpreter and for importing the function's module, neither of which counts as the call's own time.
START_TIMEOUT_S = 120.0

# Reads lines "+GROUP" and "-GROUP" and, when its server is gone, kills the groups that are left.
_GUARD = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""
_PROGRAM = "import sys; sys.path[:] = {path!r}; from services.envs.worker import main; main({parent})"


class WorkerLost(RuntimeError):
    """The worker died in the call: it crashed, exited, or the system killed it."""


class Workers:
    """At most `size` worker processes of one environment. An Executor."""

    def __init__(self, size: int, *, name: str = "none"):
        """`name` is the environment's, for metrics. Raises ValueError for a size below 1."""
        if size < 1:
            raise ValueError(f"at least 1 worker is needed, not {size}")
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._name = name
        self._guard: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Workers:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def call[T](self, function: Callable[..., T], *arguments: Any, timeout_s: float | None = None) -> T:
        """The result of the call in a worker.

        Args:
            function: importable by the worker.
            arguments: picklable.
            timeout_s: seconds from the function's start; None: for ever.

        Raises:
            TimeoutError: it took longer; it has been killed.
            WorkerLost: its process died.
            Whatever the function raised, or pickle for what it cannot carry.
        """
        request = pickle.dumps((function, arguments))
        asked = time.perf_counter()
        with metrics.blocking_waiting.labels(self._name).track_inprogress():
            await self._slots.acquire()
        try:
            metrics.blocking_wait_seconds.labels(self._name).observe(time.perf_counter() - asked)
            with metrics.blocking_running.labels(self._name).track_inprogress():
                return cast(T, await self._run(request, getattr(function, "__qualname__", "the call"), timeout_s))
        finally:
            self._slots.release()

    async def close(self) -> None:
        """Kills every worker and waits until they are gone."""
        workers, self._idle = list(self._all), []
        for worker in workers:
            worker.kill()
        await asyncio.gather(*(worker.gone() for worker in workers))
        self._all.clear()
        if self._guard is not None:
            self._tell_guard("-", *(worker.group for worker in workers))
            guard, self._guard = self._guard, None
            assert guard.stdin is not None
            guard.stdin.close()
            await guard.wait()

    async def _run(self, request: bytes, what: str, timeout_s: float | None) -> Any:
        worker = self._idle.pop() if self._idle else await self._start()
        try:
            await asyncio.wait_for(worker.begin(request), START_TIMEOUT_S)
            try:
                async with asyncio.timeout(timeout_s):
                    succeeded, result = await worker.finish()
            except TimeoutError as error:
                raise TimeoutError(f"{what} took longer than {timeout_s:g} s and was killed") from error
        except BaseException:
            metrics.blocking_killed.labels(self._name).inc()
            worker.kill()
            raise
        self._idle.append(worker)
        if succeeded:
            return result
        raise result

    async def _start(self) -> _Worker:
        gone = {worker for worker in self._all if worker.is_gone}
        self._all -= gone
        async with self._starting:
            if self._guard is None:
                self._guard = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", "-c", _GUARD), stdin=asyncio.subprocess.PIPE, start_new_session=True
                )
        self._tell_guard("-", *(worker.group for worker in gone))
        worker = await _Worker.start()
        self._tell_guard("+", worker.group)
        self._all.add(worker)
        return worker

    def _tell_guard(self, sign: str, *groups: int) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.write("".join(f"{sign}{group}\n" for group in groups).encode())


class _Worker:
    """One process; the pipe to it is its standard input, the pipe back its standard output."""

    def __init__(self, process: asyncio.subprocess.Process):
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._to, self._back = process.stdin, process.stdout

    @classmethod
    async def start(cls) -> _Worker:
        program = _PROGRAM.format(path=[entry or os.getcwd() for entry in sys.path], parent=os.getpid())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # so that one signal reaches all that it starts
        )
        return cls(process)

    @property
    def group(self) -> int:
        """Of it and all that it starts."""
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        return self._process.returncode is not None

    async def begin(self, request: bytes) -> None:
        """Hands the call over; returns when the function starts."""
        with contextlib.suppress(ConnectionError):  # the read tells how it ended
            self._to.write(len(request).to_bytes(8, "little") + request)
            await self._to.drain()
        await self._read()

    async def finish(self) -> tuple[bool, Any]:
        """Whether it returned, and what it returned or raised."""
        succeeded, result = pickle.loads(await self._read())
        return succeeded, result

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def gone(self) -> None:
        self._to.close()
        await self._process.wait()

    async def _read(self) -> bytes:
        try:
            size = int.from_bytes(await self._back.readexactly(8), "little")
            return await self._back.readexactly(size)
        except asyncio.IncompleteReadError as error:
            code = await self._process.wait()
            how = f"of signal {-code}" if code < 0 else f"with exit code {code}"
            raise WorkerLost(f"the worker process died {how}") from error
