"""The strength `monty`: a subset of Python in an interpreter that has no operating system to reach.

https://github.com/pydantic/monty. Each sandbox has a worker process of its own, started in milliseconds, so that not
even a flaw in it that one episode finds reaches another. It runs no commands and has no files.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import pydantic_monty

from services.envs.sandbox.sandbox import Code, Command, Ending, Limits, Outcome, Sandbox, SandboxError, Sandboxes

# The value of the code's last expression would be turned into an object of this process: what is printed is enough.
NO_VALUE = "\n\nNone"


class MontySandboxes(Sandboxes):
    """Opens sandboxes that are Monty interpreters."""

    def __init__(self, limits: Limits, *, max_open: int):
        self._limits = limits
        self._slots = asyncio.Semaphore(max_open)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Sandbox]:
        async with self._slots:
            sandbox = _MontySandbox(self._limits)
            try:
                yield sandbox
            finally:
                await asyncio.shield(sandbox.close())


class _MontySandbox(Sandbox):
    def __init__(self, limits: Limits):
        self._limits = limits
        self._opened = contextlib.AsyncExitStack()
        self._session: pydantic_monty.AsyncMontySession | None = None

    async def run(self, program: Code | Command, *, deadline_s: float) -> Outcome:
        if isinstance(program, Command):
            raise ValueError("Monty runs Python, no commands")
        session = self._session or await self._new_session()
        printed = _Printed(self._limits.output_bytes)
        source = program.source.encode("utf-8", "replace").decode("utf-8") + NO_VALUE
        running = asyncio.ensure_future(session.feed_run(source, print_callback=printed.take))
        flooded = asyncio.ensure_future(printed.over_limit.wait())
        try:
            await asyncio.wait({running, flooded}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            flood = printed.over_limit.is_set()
            if flood or not running.done():
                outcome = Outcome(*printed.streams(), None, Ending.OUTPUT if flood else Ending.DEADLINE, True)
            else:
                outcome = _outcome(running, printed)
        finally:
            flooded.cancel()
            running.cancel()
            await asyncio.gather(running, flooded, return_exceptions=True)
        if outcome.state_lost:
            await self.close()
        return outcome

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        raise ValueError("Monty has no files")

    async def read_files(self) -> dict[str, bytes]:
        return {}

    async def close(self) -> None:
        """Ends the interpreter."""
        self._session = None
        opened, self._opened = self._opened, contextlib.AsyncExitStack()
        try:
            await opened.aclose()
        except pydantic_monty.MontyError as error:
            raise SandboxError(f"Monty cannot close: {error}") from error

    async def _new_session(self) -> pydantic_monty.AsyncMontySession:
        try:
            pool = pydantic_monty.AsyncMonty(min_processes=1, max_processes=1)
            await self._opened.enter_async_context(pool)
            limits: pydantic_monty.ResourceLimits = {
                "max_memory": self._limits.memory_bytes,
                "max_feed_duration_secs": self._limits.cpu_s,
                "max_total_sleep_secs": self._limits.cpu_s,
            }
            self._session = await self._opened.enter_async_context(pool.checkout(limits=limits))
        except (pydantic_monty.MontyError, OSError, RuntimeError) as error:
            raise SandboxError(f"Monty cannot start: {error}") from error
        return self._session


def _outcome(run: asyncio.Future[object], printed: _Printed) -> Outcome:
    """The outcome of a run that has ended by itself."""
    stdout, stderr = printed.streams()
    error = run.exception()
    if error is None:
        return Outcome(stdout, stderr, 0)
    if isinstance(error, pydantic_monty.MontyCrashedError):
        shown, lost = f"the interpreter crashed: {error}", True
    elif isinstance(error, pydantic_monty.MontyRuntimeError | pydantic_monty.MontySyntaxError):
        # After a time limit Monty vouches for nothing that the session holds.
        shown, lost = error.display(), error.display("type-msg").startswith("TimeoutError")
    else:
        raise SandboxError(f"Monty failed: {error!r}") from error
    shown = shown.encode("utf-8", "replace").decode("utf-8").rstrip()
    return Outcome(stdout, f"{stderr}{shown}\n"[: printed.limit], 1, state_lost=lost)


class _Printed:
    """What the code has printed, up to a limit of bytes for each stream."""

    def __init__(self, limit: int):
        self.limit = limit
        self.over_limit = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._chunks: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self._left = {"stdout": limit, "stderr": limit}

    def take(self, stream: str, text: str) -> None:
        """Called by Monty, on a thread of its choice."""
        data = text.encode("utf-8", "replace")
        self._chunks[stream].append(data[: self._left[stream]])
        self._left[stream] -= len(self._chunks[stream][-1])
        if len(data) > len(self._chunks[stream][-1]):
            self._loop.call_soon_threadsafe(self.over_limit.set)

    def streams(self) -> tuple[str, str]:
        """stdout and stderr."""
        stdout, stderr = (b"".join(self._chunks[stream]).decode("utf-8", "replace") for stream in self._chunks)
        return stdout, stderr
