"""The strength `container`: each sandbox is a container of Docker's, under runc or another runtime such as gVisor's.

The image needs Python 3.9 or newer as `python3`, and holds nothing of ours: the supervisor travels as an argument and
is reached over the container's standard streams. Docker's API blocks, so it is called in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests

from services.envs.sandbox.sandbox import Limits, Sandbox, SandboxError, Sandboxes
from services.envs.sandbox.supervised import Supervised

SUPERVISOR, INTERPRETER = (Path(__file__).with_name(name) for name in ("supervisor.py", "interpreter.py"))
SCRATCH = "/scratch"
NOBODY = 65534
STDOUT = 1
CPU_PERIOD_US = 100_000


class ContainerSandboxes(Sandboxes):
    """Opens sandboxes that are containers."""

    def __init__(self, limits: Limits, *, max_open: int, image: str, runtime: str, allow_network: bool, cpus: float):
        """Connects to the daemon that DOCKER_HOST names, else the local one.

        Args:
            cpus: processors' worth of time that one sandbox may take.

        Raises SandboxError: no daemon answers, or it lacks the image or the runtime.
        """
        self._limits = limits
        self._slots = asyncio.Semaphore(max_open)
        try:
            self._docker = docker.from_env(timeout=120)
            known = self._docker.info().get("Runtimes", {})
            if runtime not in known:
                raise SandboxError(f"docker has no runtime {runtime!r}, but {', '.join(sorted(known))}")
            self._docker.images.get(image)
        except (docker.errors.DockerException, requests.RequestException) as error:
            raise SandboxError(f"docker: {error}") from error
        config = {
            "limits": dataclasses.asdict(limits),
            "scratch": SCRATCH,
            "python": "python3",
            "path": "/usr/local/bin:/usr/bin:/bin",
            "interpreter": INTERPRETER.read_text(encoding="utf-8"),
            "nproc": None,  # it would count over all containers; the cgroup's limit does not
            "watch_scratch": False,
        }
        # Docker's own seccomp profile stays. tini is no part: the supervisor reaps.
        self._options: dict[str, Any] = {
            "image": image,
            "command": ["-I", "-S", "-c", SUPERVISOR.read_text(encoding="utf-8"), json.dumps(config)],
            "entrypoint": ["python3"],
            "runtime": runtime,
            "stdin_open": True,
            "user": f"{NOBODY}:{NOBODY}",
            "environment": {},
            "working_dir": "/",
            "network_mode": "bridge" if allow_network else "none",
            "read_only": True,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "ipc_mode": "private",
            "mem_limit": limits.memory_bytes + limits.scratch_bytes,
            "memswap_limit": limits.memory_bytes + limits.scratch_bytes,
            "pids_limit": limits.processes + 1,
            "cpu_period": CPU_PERIOD_US,
            "cpu_quota": int(cpus * CPU_PERIOD_US),
            "tmpfs": {
                SCRATCH: f"rw,nosuid,nodev,exec,mode=700,uid={NOBODY},gid={NOBODY},"
                f"size={limits.scratch_bytes},nr_inodes={limits.scratch_files}"
            },
            "log_config": docker.types.LogConfig(type="none"),
            "labels": {"headrace.sandbox": "1"},
        }

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Sandbox]:
        async with self._slots, self._container() as streams:
            sandbox = Supervised(streams, self._limits)
            await sandbox.start()
            yield sandbox

    @contextlib.asynccontextmanager
    async def _container(self) -> AsyncIterator[_Attached]:
        # A call in a thread ends in its own time: shielded, so that what it made is known and removed.
        starting = asyncio.ensure_future(asyncio.to_thread(self._start))
        try:
            container, stream = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._remove_unwanted)
            raise
        try:
            stream.setblocking(False)
            yield _Attached(container, stream)
        finally:
            await asyncio.shield(asyncio.to_thread(self._remove, container, stream))

    def _start(self) -> tuple[Any, socket.socket]:
        try:
            container = self._docker.containers.create(**self._options)
            try:
                attached = container.attach_socket(params={"stdin": 1, "stdout": 1, "stream": 1})
                # Over a Unix socket docker hands out Python's file around it, with no other way to the socket.
                stream = socket.socket(fileno=attached._sock.detach())
                container.start()
            except BaseException:
                container.remove(force=True)
                raise
        except (docker.errors.DockerException, requests.RequestException) as error:
            raise SandboxError(f"docker: {error}") from error
        return container, stream

    def _remove_unwanted(self, starting: asyncio.Future[tuple[Any, socket.socket]]) -> None:
        if starting.exception() is None:
            asyncio.get_running_loop().run_in_executor(None, self._remove, *starting.result())

    def _remove(self, container: Any, stream: socket.socket) -> None:
        stream.close()
        with contextlib.suppress(docker.errors.NotFound):
            container.remove(force=True)


class _Attached:
    """A container's standard streams over one socket: stdout comes in frames that each name their stream."""

    def __init__(self, container: Any, stream: socket.socket):
        self._container = container
        self._stream = stream
        self._received = bytearray()

    async def killed_for_limits(self) -> bool:
        return await asyncio.to_thread(self._killed)

    def _killed(self) -> bool:
        """Whether the container has ended by itself. gVisor's does as soon as a limit is hit; runc's when memory is."""
        try:
            ended = self._container.wait(timeout=30)
            self._container.reload()
        except (docker.errors.DockerException, requests.RequestException) as error:
            raise SandboxError(f"docker: {error}") from error
        return bool(self._container.attrs["State"]["OOMKilled"] or ended["StatusCode"])

    async def read(self, size: int) -> bytes:
        while len(self._received) < size:
            kind, length = struct.unpack("!B3xI", await self._exactly(8))
            payload = await self._exactly(length)
            if kind == STDOUT:
                self._received += payload
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._stream, data)

    async def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = await asyncio.get_running_loop().sock_recv(self._stream, min(size - len(data), 1 << 20))
            if not chunk:
                raise EOFError("the container has ended")
            data += chunk
        return bytes(data)
