"""Code that attacks: each hazard that a strength claims to stop is tried on it, and the sandbox still works afterwards.

What counts is seen from outside: a port, a file, a process of this machine that the code must not reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest

import services
from services.envs.sandbox.hazards import CLAIMS, Hazard
from services.envs.sandbox.sandbox import Code, Command, Ending, Outcome, Refused, Sandbox
from tests.envs.sandbox.strengths import EACH_WAY, LIMITS, WAYS, running, sandboxes

DEADLINE_S = 60.0
SECRET = "the-secret-of-this-machine"


@dataclass(frozen=True)
class Target:
    """A sandbox under attack, and what lies outside it."""

    sandbox: Sandbox
    way: str
    secret: pathlib.Path
    marker: str
    """A word that every process of the attack carries among its arguments."""

    async def code(self, source: str, deadline_s: float = DEADLINE_S) -> Outcome:
        outcome = await self.sandbox.run(Code(source), deadline_s=deadline_s)
        assert SECRET not in outcome.stdout + outcome.stderr
        return outcome

    async def command(self, source: str, deadline_s: float = DEADLINE_S) -> Outcome:
        """Runs Python as a program."""
        command = Command(["python3", "-I", "-S", "-c", source, self.marker])
        outcome = await self.sandbox.run(command, deadline_s=deadline_s)
        assert SECRET not in outcome.stdout + outcome.stderr
        return outcome

    async def none_survive(self) -> None:
        await asyncio.to_thread(self._wait_for_their_end)

    def _wait_for_their_end(self) -> None:
        end = time.monotonic() + 60
        while found := running(self.marker):
            assert time.monotonic() < end, found
            time.sleep(0.05)


ATTACKS: dict[Hazard, Callable[[Target], Awaitable[None]]] = {}


def attack(hazard: Hazard):
    """Registers the attack of a hazard."""

    def register(function):
        ATTACKS[hazard] = function
        return function

    return register


@attack(Hazard.FORK_BOMB)
async def fork_bomb(target: Target) -> None:
    if target.way == "monty":
        for source in ("import os\nos.fork()", "import subprocess", "import multiprocessing", "import threading"):
            assert not (await target.code(source)).succeeded
        return
    outcome = await target.command(
        "import os\n"
        "while True:\n"
        "    try:\n"
        "        os.fork()\n"
        "    except OSError:\n"
        "        os.write(1, b'refused ' * 100)\n"
    )
    assert outcome.ending is Ending.OUTPUT and "refused" in outcome.stdout
    await target.none_survive()


@attack(Hazard.MEMORY_BOMB)
async def memory_bomb(target: Target) -> None:
    for source in (
        "x = []\nwhile True: x.append('a' * 10_000_000)",
        "x = 'a' * 10**9",
        "x = [0] * 10**9",
        "x = 1 << 10**10",
    ):
        outcome = await target.code(source)
        assert not outcome.succeeded and (outcome.exit_status is None or "MemoryError" in outcome.stderr)


@attack(Hazard.ENDLESS_OUTPUT)
async def endless_output(target: Target) -> None:
    outcome = await target.code("while True: print('x' * 1000)")
    assert outcome.ending is Ending.OUTPUT and outcome.state_lost
    assert 0 < len(outcome.stdout) <= LIMITS.output_bytes
    if target.way != "monty":
        outcome = await target.command("import os\nwhile True: os.write(2, b'\\xff' * 65536)")
        assert outcome.ending is Ending.OUTPUT and len(outcome.stderr) <= LIMITS.output_bytes


@attack(Hazard.DESCRIPTOR_LEAK)
async def descriptor_leak(target: Target) -> None:
    if target.way == "monty":
        assert not (await target.code("open('/dev/null')")).succeeded
        return
    outcome = await target.command(
        "import os\n"
        "def is_open(fd):\n"
        "    try: os.fstat(fd)\n"
        "    except OSError: return False\n"
        "    return True\n"
        "print([fd for fd in range(1024) if is_open(fd)])\n"
        "kept = []\n"
        "try:\n"
        "    while True: kept.append(open('/dev/null'))\n"
        "except OSError: print(len(kept))\n"
    )
    first, second = outcome.stdout.splitlines()
    assert first == "[0, 1, 2]" and int(second) < LIMITS.open_files


@attack(Hazard.NETWORK)
async def network(target: Target) -> None:
    with (
        socket.create_server(("0.0.0.0", 0)) as listener,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        datagrams.bind(("127.0.0.1", 0))
        for each in (listener, datagrams):
            each.setblocking(False)
        outcome = await target.code(
            "import socket\n"
            f"for address in ('127.0.0.1', {socket.gethostbyname(socket.gethostname())!r}):\n"
            "    try:\n"
            f"        socket.create_connection((address, {listener.getsockname()[1]}), 2)\n"
            "        print('connected')\n"
            "    except OSError as error: print(error)\n"
            "    try:\n"
            "        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:\n"
            f"            sender.sendto(b'x', (address, {datagrams.getsockname()[1]}))\n"
            "    except OSError as error: print(error)\n"
            "    for family in (socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET):\n"
            "        try: socket.socket(family, socket.SOCK_RAW)\n"
            "        except OSError as error: print(error)\n"
        )
        assert "connected" not in outcome.stdout
        with pytest.raises(BlockingIOError):
            listener.accept()
        with pytest.raises(BlockingIOError):
            datagrams.recv(1)


@attack(Hazard.OUTSIDE_FILES)
async def outside_files(target: Target) -> None:
    source = pathlib.Path(services.envs.sandbox.hazards.__file__)
    paths = [
        target.secret,
        source,
        f"/proc/{os.getpid()}/environ",
        f"/proc/{os.getppid()}/cwd/README.md",
        "/etc/shadow",
    ]
    for path in map(str, paths):
        outcome = await target.code(f"print('READ', len(open({path!r}, 'rb').read()))")
        assert "READ" not in outcome.stdout or "READ 0" in outcome.stdout, path
    if target.way != "container":  # whose image has its own
        assert not (await target.code("print(open('/etc/passwd').read())")).succeeded
    await target.code(f"open({str(target.secret)!r}, 'w').write('overwritten')")
    assert target.secret.read_text() == SECRET


@attack(Hazard.SYMLINK_ESCAPE)
async def symlink_escape(target: Target) -> None:
    secret = str(target.secret)
    if target.way == "monty":
        assert not (await target.code(f"import os\nos.symlink({secret!r}, 'link')")).succeeded
        return
    assert (await target.code(f"import os\nos.symlink({secret!r}, 'link')\nos.symlink('/', 'root')")).succeeded
    assert not (await target.code("print(open('link').read())")).succeeded
    assert not (await target.code(f"print(open('root{secret}').read())")).succeeded
    assert not (await target.code("import os\nos.link('link', 'hard')\nprint(open('hard').read())")).succeeded
    assert not {"link", "root", "hard"} & set(await target.sandbox.read_files())
    await target.sandbox.write_files({"link": b"ours"})
    with contextlib.suppress(Refused):
        await target.sandbox.write_files({f"root{secret}": b"overwritten"})
    assert target.secret.read_text() == SECRET
    assert (await target.sandbox.read_files())["link"] == b"ours"


@attack(Hazard.SIGNALS)
async def signals(target: Target) -> None:
    with outsider() as victim:
        pids = [victim.pid, os.getpid(), os.getppid()]
        outcome = await target.code(
            f"import os\nfor pid in (*{pids}, 1, os.getppid()):\n"
            "    for name in ('kill', 'killpg'):\n"
            "        if pid in (0, os.getpid(), os.getpgrp()): continue\n"
            "        try: getattr(os, name)(pid, 9)\n"
            "        except OSError: pass\n"
        )
        assert outcome.succeeded or target.way == "monty"
        await target.code("import os\nos.kill(-1, 9)")
        assert victim.poll() is None


@contextlib.contextmanager
def outsider() -> Iterator[subprocess.Popen]:
    """A process of this machine that does nothing."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        try:
            yield victim
        finally:
            victim.kill()


@attack(Hazard.ZOMBIES)
async def zombies(target: Target) -> None:
    if target.way == "monty":
        assert not (await target.code("import os\nos.fork()")).succeeded
        return
    outcome = await target.command(
        "import os, signal, time\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        for number in range(1, 65):\n"
        "            try: signal.signal(number, signal.SIG_IGN)\n"
        "            except (OSError, ValueError): pass\n"
        "        try: os.setsid()\n"
        "        except OSError: pass\n"
        "        if os.fork() == 0:\n"
        "            os.closerange(0, 3)\n"
        "            time.sleep(600)\n"
        "        os._exit(0)\n"
        "print('left')\n"
    )
    assert outcome.succeeded and outcome.stdout == "left\n"
    await target.none_survive()
    for _ in range(2 * LIMITS.processes):  # orphans are reaped, so that they do not use up the number of processes
        assert (await target.code("import os\nif os.fork() == 0: os._exit(0)\nos.wait()")).succeeded


@attack(Hazard.DEADLINE)
async def deadline(target: Target) -> None:
    await target.code("kept = 1")
    for source in ("while True: pass", "import time\nwhile True: time.sleep(1)", "for i in range(10**12): i * i"):
        outcome = await target.code(source, deadline_s=0.3)
        assert outcome.ending is Ending.DEADLINE and outcome.exit_status is None and outcome.state_lost
    assert "NameError" in (await target.code("kept")).stderr
    if target.way != "monty":
        outcome = await target.command(
            "import os, signal, time\n"
            "for number in (1, 2, 3, 15): signal.signal(number, signal.SIG_IGN)\n"
            "if os.fork() == 0:\n"
            "    try: os.setsid()\n"
            "    except OSError: pass\n"
            "print('started', flush=True)\n"
            "while True: time.sleep(600)\n",
            deadline_s=3,
        )
        assert outcome.ending is Ending.DEADLINE and outcome.exit_status is None
        await target.none_survive()


@attack(Hazard.PICKLE)
async def pickled(target: Target) -> None:
    canary = target.secret.with_name("canary")
    outcome = await target.code(
        "import pickle, os\n"
        "class Trap:\n"
        f"    def __reduce__(self): return os.system, ('cat {target.secret}; touch {canary}',)\n"
        "pickle.loads(pickle.dumps(Trap()))\n"
    )
    assert not canary.exists() and SECRET not in outcome.stdout
    if target.way == "monty":
        assert not outcome.succeeded


@attack(Hazard.FULL_SCRATCH)
async def full_scratch(target: Target) -> None:
    if target.way == "monty":
        assert not (await target.code("open('file', 'w').write('x')")).succeeded
        return
    await target.command("file = open('big', 'wb')\nwhile True: file.write(b'x' * 100_000)")
    await target.command("number = 0\nwhile True: open(f'small{number}', 'x').close(); number += 1")
    await target.command("number = 0\nwhile True: open(f'some{number}', 'xb').write(b'x' * 100_000); number += 1")
    await target.command(
        "import io, zipfile\n"
        "packed = io.BytesIO()\n"
        "with zipfile.ZipFile(packed, 'w', zipfile.ZIP_DEFLATED) as archive:\n"
        "    for number in range(20): archive.writestr(f'zeros{number}', bytes(10_000_000))\n"
        "zipfile.ZipFile(packed).extractall()\n"
    )
    await target.command("import os\nfor _ in range(10_000): os.mkdir('d'); os.chdir('d')")
    files = await target.sandbox.read_files()
    assert sum(map(len, files.values())) <= LIMITS.scratch_bytes and len(files) <= LIMITS.scratch_files
    removal = Command(["sh", "-c", "rm -rf *"])
    assert (await target.sandbox.run(removal, deadline_s=DEADLINE_S)).exit_status == 0


@attack(Hazard.ODD_TEXT)
async def odd_text(target: Target) -> None:
    assert (await target.code("print('a\\0b', '🙂')")).stdout == "a\0b 🙂\n"
    for source in ("\0", "x = '\udc80'", "print('\ud800')", "\ufeffx = 1", "\x1b[2J" * 1000, "é" * 100_000):
        (await target.code(source)).stderr.encode()
    if target.way == "monty":
        return
    assert (await target.command("import os\nos.write(1, b'\\xff\\0\\xc3')")).stdout == "\ufffd\0\ufffd"
    for argv in (["echo", "a\0b"], ["echo", "\udc80"], ["\ud800"], [""], ["no/such"], ["echo", "x" * 200_000]):
        outcome = await target.sandbox.run(Command(argv), deadline_s=DEADLINE_S)
        (outcome.stdout + outcome.stderr).encode()
        assert outcome.ending is Ending.EXITED
    await target.code("import os\nopen(b'\\xff\\xfe', 'w').close()")
    "".join(await target.sandbox.read_files()).encode()


@attack(Hazard.PRIVILEGES)
async def privileges(target: Target) -> None:
    if target.way == "monty":
        assert not (await target.code("import ctypes")).succeeded
        return
    outcome = await target.code(
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None)\n"
        "def allowed(result): return result == 0\n"
        "print(allowed(libc.unshare(0x10000000)), allowed(libc.mount(b'none', b'/scratch', b'tmpfs', 0, b'')),\n"
        "      allowed(libc.ptrace(16, os.getppid(), 0, 0)), allowed(libc.setuid(0)), allowed(libc.chroot(b'.')),\n"
        "      libc.prctl(39, 0, 0, 0, 0))\n"
    )
    assert outcome.stdout == "False False False False False 1\n"


@attack(Hazard.SECRETS)
async def secrets(target: Target) -> None:
    assert "PYTEST_CURRENT_TEST" in os.environ
    outcome = await target.code("import os\nprint(sorted(os.environ))")
    if target.way == "monty":
        assert not outcome.succeeded
        return
    names = set(re.findall(r"'(\w+)'", outcome.stdout))
    assert {"HOME", "PATH"} <= names <= {"HOME", "LANG", "PATH", "PYTHONDONTWRITEBYTECODE", "TMPDIR", "LC_CTYPE"}


def test_every_hazard_has_an_attack():
    assert set(ATTACKS) == set(Hazard)


@pytest.mark.parametrize("hazard", Hazard, ids=lambda hazard: hazard.name.lower())
@pytest.mark.parametrize("way", EACH_WAY)
async def test_it_is_stopped(way, hazard, tmp_path):
    if hazard not in CLAIMS[WAYS[way]]:
        pytest.skip(f"{WAYS[way].value} does not claim to stop it")
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    for path in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        with contextlib.suppress(OSError):
            path.chmod(0o755)
    async with sandboxes(way).open() as sandbox:
        await sandbox.run(Code("1"), deadline_s=DEADLINE_S)
    descriptors = len(os.listdir("/proc/self/fd"))
    async with sandboxes(way).open() as sandbox:
        target = Target(sandbox, way, secret, f"marker-{uuid.uuid4()}")
        await ATTACKS[hazard](target)
        assert (await target.code("print(6 * 7)")).stdout == "42\n"
    await target.none_survive()
    kept = 30 if way == "container" else 2  # the connections of docker's client, or what the loop keeps
    assert len(os.listdir("/proc/self/fd")) <= descriptors + kept
