"""Every way in which a sandbox can isolate, for tests to try; those that this machine lacks are skipped."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import StartupError
from services.envs.sandbox import landlock
from services.envs.sandbox.choice import Choice, verified
from services.envs.sandbox.hazards import Strength
from services.envs.sandbox.process import ProcessSandboxes
from services.envs.sandbox.sandbox import MIB, Limits, Sandboxes
from tests import processes

LIMITS = Limits(memory_bytes=128 * MIB, processes=12, cpu_s=20, scratch_bytes=4 * MIB, scratch_files=256)
WAYS = {
    "monty": Strength.MONTY,
    "namespaces": Strength.PROCESS,
    "landlock": Strength.PROCESS,
    "container": Strength.CONTAINER,
}
# Containers take a second or more each.
EACH_WAY = [pytest.param(way, marks=pytest.mark.slow if way == "container" else ()) for way in WAYS]
EACH_WAY_WITH_COMMANDS = EACH_WAY[1:]
IMAGES = ("python:3.12-slim", "local/python:3.12")


def sandboxes(way: str, *, max_open: int = 4) -> Sandboxes:
    """Sandboxes of a way, or the test is skipped."""
    if way == "monty":
        return verified(Choice(strength=Strength.MONTY, limits=LIMITS, max_open=max_open))
    if way == "container":
        return _containers(max_open)
    if way == "landlock" and os.geteuid() == 0:
        pytest.skip("Landlock serves users other than root: see test_landlock_as_nobody")
    if way == "landlock" and landlock.version() < landlock.FIRST_VERSION_WITH_SCOPES:
        pytest.skip(f"this kernel has version {landlock.version()} of Landlock")
    if way == "namespaces" and not namespaces_allowed():
        pytest.skip("this machine allows no user namespaces")
    return ProcessSandboxes(LIMITS, max_open=max_open, allow_network=False, way=way)


@functools.cache
def namespaces_allowed() -> bool:
    """Whether a process may make namespaces here."""
    trial = "import os; os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWNET)"
    return subprocess.run([sys.executable, "-c", trial], stderr=subprocess.DEVNULL, check=False).returncode == 0


@functools.cache
def _containers(max_open: int) -> Sandboxes:
    import docker

    try:
        client = docker.from_env()
        local = {tag for image in client.images.list() for tag in image.tags}
    except docker.errors.DockerException as error:
        pytest.skip(f"docker does not answer: {str(error)[:80]}")
    image = next((name for name in IMAGES if name in local), None)
    if image is None:
        pytest.skip(f"docker has none of the images {IMAGES}")
    try:
        return verified(Choice(strength=Strength.CONTAINER, limits=LIMITS, max_open=max_open, image=image))
    except StartupError as error:
        pytest.skip(str(error))


def children() -> set[int]:
    """Process ids of this process's children."""
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


def running(marker: str) -> list[int]:
    """Process ids of this machine that carry a word among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def jails() -> set[int]:
    """Those that hold a sandbox of the strength `process`."""
    return {pid for pid in children() if "jail.main" in Path(f"/proc/{pid}/cmdline").read_text()}


async def kill_jails() -> None:
    """Kills them; returns when they are dead, and with them what they hold: until then they may still answer."""
    killed = jails()
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(processes.wait_until, lambda: not any(map(_is_alive, killed)), timeout_s=60)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
