"""The strength `process`: each sandbox is a Python process that shuts itself in (jail.py), and what it starts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

from services.envs.sandbox import jail
from services.envs.sandbox import scratch as scratches
from services.envs.sandbox.sandbox import Limits, Sandbox, SandboxError, Sandboxes
from services.envs.sandbox.supervised import Supervised

IMPORT_ROOT = str(Path(__file__).resolve().parents[3])
START = f"import sys; sys.path.insert(0, {IMPORT_ROOT!r}); from services.envs.sandbox import jail; jail.main()"
INTERPRETER = Path(__file__).with_name("interpreter.py")

type Way = Literal["namespaces", "landlock"]


class ProcessSandboxes(Sandboxes):
    """Opens sandboxes that are processes of this machine."""

    def __init__(self, limits: Limits, *, max_open: int, allow_network: bool, way: Way):
        """Args: way: by which means of the kernel; which of them work is for the caller to verify."""
        self._limits = limits
        self._slots = asyncio.Semaphore(max_open)
        readable, hidden = jail.readable_paths()
        self._python = os.path.realpath(sys.executable)
        self._config = {
            "way": way,
            "limits": dataclasses.asdict(limits),
            "allow_network": allow_network,
            "max_open": max_open,
            "readable": readable,
            "hidden": hidden,
            "python": self._python,
            "path": f"{os.path.dirname(self._python)}:/usr/local/bin:/usr/bin:/bin",
            "interpreter": INTERPRETER.read_text(encoding="utf-8"),
            "watch_scratch": way == "landlock",
        }

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Sandbox]:
        async with self._slots:
            scratch = ""
            if self._config["way"] == "landlock":
                scratch = await asyncio.to_thread(scratches.make)
            try:
                async with self._process(scratch) as process:
                    sandbox = Supervised(_Pipes(process), self._limits)
                    await sandbox.start()
                    yield sandbox
            finally:
                if scratch:
                    await asyncio.shield(_remove(scratch))

    @contextlib.asynccontextmanager
    async def _process(self, scratch: str) -> AsyncIterator[asyncio.subprocess.Process]:
        try:
            process = await asyncio.create_subprocess_exec(
                self._python,
                *("-I", "-S", "-c", START, json.dumps({**self._config, "scratch": scratch})),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"no process for a sandbox: {error}") from error
        try:
            yield process
        finally:
            # Its namespaces end with it, and everything in them; elsewhere it kills its children at the end of stdin.
            assert process.stdin
            process.stdin.close()
            await asyncio.shield(_ended(process))


async def _remove(scratch: str) -> None:
    remover = await asyncio.create_subprocess_exec(
        *scratches.removal(scratch), stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    await remover.wait()


async def _ended(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(10):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


class _Pipes:
    """The streams of a child process."""

    def __init__(self, process: asyncio.subprocess.Process):
        assert process.stdin and process.stdout
        self._reader, self._writer = process.stdout, process.stdin

    async def killed_for_limits(self) -> bool:
        return False  # limits end what runs in there, never the supervisor

    async def read(self, size: int) -> bytes:
        return await self._reader.readexactly(size)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()
