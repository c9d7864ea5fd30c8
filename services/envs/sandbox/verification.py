"""Tries at start whether a sandbox isolates on this machine, by code in it that attempts what it must not be able to.

Only what depends on the machine is tried here; the red-team tests try everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from services.envs.sandbox.hazards import Strength
from services.envs.sandbox.sandbox import Code, SandboxError, Sandboxes

DEADLINE_S = 30.0
SECRET = "secret"

# Prints what it could do.
PROBE = """
import json, os, socket
facts, done = json.loads({facts!r}), []
def attempt(name, action):
    try:
        if action() is not False:
            done.append(name)
    except (OSError, MemoryError):
        pass
def connect(address):
    with socket.socket() as client:
        client.settimeout(2)
        client.connect((address, facts["port"]))
for address in facts["addresses"]:
    attempt("it reaches the network", lambda: connect(address))
for path in facts["paths"]:
    attempt("it reads " + path, lambda: open(path, "rb").read(1) != b"")
if facts["victim"] not in (1, os.getpid(), os.getppid()):
    attempt("it signals to processes outside", lambda: os.kill(facts["victim"], 0))
attempt("it takes more memory than its limit", lambda: len(bytearray(2 * facts["memory_bytes"])) > 0)
attempt("", lambda: open(facts["paths"][0], "w").write("written") and False)
attempt("it runs as root", lambda: os.getuid() == 0)
print(json.dumps(done))
"""

MONTY_PROBE = """
import json
done = []
for path in json.loads({facts!r})["paths"]:
    try:
        open(path).read()
        done.append("it reads " + path)
    except Exception:
        pass
try:
    import socket
    done.append("it reaches the network")
except Exception:
    pass
print(json.dumps(done))
"""


@dataclass(frozen=True)
class Facts:
    """What the probe tries to reach."""

    addresses: list[str]
    port: int
    paths: list[str]
    victim: int
    memory_bytes: int


async def faults(sandboxes: Sandboxes, strength: Strength, *, memory_bytes: int, allow_network: bool) -> list[str]:
    """What code in a sandbox can do here and must not; empty when it is isolated. Raises SandboxError."""
    with _bait(memory_bytes, allow_network=allow_network) as facts:
        probe = MONTY_PROBE if strength is Strength.MONTY else PROBE
        async with sandboxes.open() as sandbox:
            outcome = await sandbox.run(Code(probe.format(facts=json.dumps(asdict(facts)))), deadline_s=DEADLINE_S)
        written = _content(facts.paths[0]) != SECRET
    if not outcome.succeeded:
        raise SandboxError(f"code does not run ({outcome.ending.value}: {outcome.stderr.strip()[-300:]})")
    found = json.loads(outcome.stdout) + (["it writes outside its scratch directory"] if written else [])
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def _bait(memory_bytes: int, *, allow_network: bool) -> Iterator[Facts]:
    """A port that answers, files that anybody may read, and a process: all of them outside."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        secret = stack.enter_context(tempfile.NamedTemporaryFile("w", prefix="sandbox-bait-"))
        secret.write(SECRET)
        secret.flush()
        os.chmod(secret.name, 0o644)
        victim = stack.enter_context(subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=-1))
        stack.callback(victim.kill)
        yield Facts(
            addresses=[] if allow_network else ["127.0.0.1", *_own_address()],
            port=listener.getsockname()[1],
            paths=[secret.name, os.path.abspath(__file__), f"/proc/{os.getpid()}/environ"],
            victim=victim.pid,
            memory_bytes=memory_bytes,
        )


def _content(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _own_address() -> list[str]:
    """This machine's address in its network, if it is in one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return []
        return [probe.getsockname()[0]]
