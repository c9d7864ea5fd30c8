"""What every sandbox keeps: state within the episode, files, limits on how many are open, nothing left behind."""

import asyncio
import signal
import subprocess
import sys
import time
import uuid

import pytest

from headrace.errors import StartupError
from services.envs.sandbox import choice, supervised
from services.envs.sandbox.choice import Choice, verified
from services.envs.sandbox.hazards import Strength
from services.envs.sandbox.process import ProcessSandboxes
from services.envs.sandbox.sandbox import Code, Command, Ending, Limits, Refused, SandboxError
from tests.envs.sandbox.strengths import (
    EACH_WAY,
    EACH_WAY_WITH_COMMANDS,
    LIMITS,
    children,
    kill_jails,
    running,
    sandboxes,
)

DEADLINE_S = 60.0


@pytest.mark.parametrize("way", EACH_WAY)
async def test_state_is_kept_within_the_episode_and_not_beyond(way):
    opened = sandboxes(way)
    async with opened.open() as first, opened.open() as second:
        outcome = await first.run(Code("x = 6\ndef double(y): return 2 * y\nprint('bound')"), deadline_s=DEADLINE_S)
        assert (outcome.stdout, outcome.stderr, outcome.exit_status) == ("bound\n", "", 0) and outcome.succeeded
        assert (await first.run(Code("print(double(x))"), deadline_s=DEADLINE_S)).stdout == "12\n"
        assert "NameError" in (await second.run(Code("print(x)"), deadline_s=DEADLINE_S)).stderr
    async with opened.open() as third:
        outcome = await third.run(Code("print(x)"), deadline_s=DEADLINE_S)
        assert "NameError" in outcome.stderr and outcome.exit_status == 1 and not outcome.state_lost


@pytest.mark.parametrize("way", EACH_WAY)
async def test_an_exception_is_an_observation(way):
    async with sandboxes(way).open() as sandbox:
        for source, error in [
            ("1 / 0", "ZeroDivisionError"),
            ("def f(: pass", "SyntaxError"),
            ("def f(): return f()\nf()", "RecursionError"),
            ("print('before')\nraise ValueError('why')", "ValueError: why"),
        ]:
            outcome = await sandbox.run(Code(source), deadline_s=DEADLINE_S)
            assert error in outcome.stderr or (error == "SyntaxError" and outcome.stderr)
            assert outcome.exit_status == 1 and outcome.ending is Ending.EXITED and not outcome.state_lost
        assert outcome.stdout == "before\n"


@pytest.mark.parametrize("way", EACH_WAY)
async def test_no_more_are_open_than_allowed(way):
    opened = sandboxes(way, max_open=2)
    entered = asyncio.Event()

    async def third() -> None:
        async with opened.open() as sandbox:
            entered.set()
            assert (await sandbox.run(Code("print(3)"), deadline_s=DEADLINE_S)).stdout == "3\n"

    async with asyncio.TaskGroup() as group, opened.open() as first, opened.open() as second:
        group.create_task(third())
        for sandbox in (first, second):
            assert (await sandbox.run(Code("print(1)"), deadline_s=DEADLINE_S)).stdout == "1\n"
        assert not entered.is_set()
    assert entered.is_set()


@pytest.mark.parametrize("way", EACH_WAY)
async def test_the_loop_is_free_while_code_runs(way):
    async with sandboxes(way).open() as sandbox:
        run = asyncio.create_task(sandbox.run(Code("while True: pass"), deadline_s=1))
        ticks = 0
        while not run.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert (await run).ending is Ending.DEADLINE and ticks > 3


@pytest.mark.parametrize("way", EACH_WAY)
async def test_a_cancelled_run_leaves_nothing(way):
    opened = sandboxes(way, max_open=1)

    async def episode(running: asyncio.Event) -> None:
        async with opened.open() as sandbox:
            running.set()
            await sandbox.run(Code("while True: pass"), deadline_s=600)

    running = asyncio.Event()
    task = asyncio.create_task(episode(running))
    await running.wait()
    before = children()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert not (before & children()) or way == "container"
    async with opened.open() as sandbox:  # its slot is free again
        assert (await sandbox.run(Code("print(1)"), deadline_s=DEADLINE_S)).stdout == "1\n"


@pytest.mark.parametrize("way", EACH_WAY_WITH_COMMANDS)
async def test_commands_and_files(way):
    async with sandboxes(way).open() as sandbox:
        await sandbox.write_files(
            {"a/b.py": b"import sys\nprint(sys.stdin.read().upper())", "c.bin": bytes(range(256))}
        )
        outcome = await sandbox.run(Command(["python3", "a/b.py"], b"x" * 100_000), deadline_s=DEADLINE_S)
        assert outcome.ending is Ending.OUTPUT or outcome.stdout == "X" * 100_000 + "\n"
        outcome = await sandbox.run(Command(["python3", "a/b.py"], b"abc"), deadline_s=DEADLINE_S)
        assert (outcome.stdout, outcome.exit_status) == ("ABC\n", 0)
        outcome = await sandbox.run(Command(["sh", "-c", "echo out; echo err >&2; exit 3"]), deadline_s=DEADLINE_S)
        assert (outcome.stdout, outcome.stderr, outcome.exit_status) == ("out\n", "err\n", 3)
        outcome = await sandbox.run(Command(["sh", "-c", "kill -SEGV $$"]), deadline_s=DEADLINE_S)
        assert outcome.exit_status == -signal.SIGSEGV
        outcome = await sandbox.run(Command(["no-such-program"]), deadline_s=DEADLINE_S)
        assert outcome.exit_status == 127 and "no-such-program" in outcome.stderr
        await sandbox.write_files({"a/b.py": b"new"})
        assert await sandbox.read_files() == {"a/b.py": b"new", "c.bin": bytes(range(256))}


@pytest.mark.parametrize("way", EACH_WAY_WITH_COMMANDS)
async def test_an_interpreter_that_dies_is_started_again(way):
    async with sandboxes(way).open() as sandbox:
        await sandbox.run(Code("x = 1"), deadline_s=DEADLINE_S)
        outcome = await sandbox.run(Code("import os\nos._exit(7)"), deadline_s=DEADLINE_S)
        assert (outcome.exit_status, outcome.state_lost, outcome.ending) == (7, True, Ending.EXITED)
        outcome = await sandbox.run(Code("import sys\nsys.exit(3)"), deadline_s=DEADLINE_S)
        assert (outcome.exit_status, outcome.state_lost) == (3, False)
        outcome = await sandbox.run(Code("import os\nos.close(1)\nos.close(4)\nprint(1)"), deadline_s=2)
        assert outcome.state_lost and not outcome.succeeded
        assert (await sandbox.run(Code("print(2)"), deadline_s=DEADLINE_S)).stdout == "2\n"


async def test_monty_says_what_it_cannot():
    async with sandboxes("monty").open() as sandbox:
        with pytest.raises(ValueError, match="no commands"):
            await sandbox.run(Command(["ls"]), deadline_s=1)
        with pytest.raises(ValueError, match="no files"):
            await sandbox.write_files({"a": b""})


async def test_a_sandbox_that_dies_is_an_infrastructure_failure():
    async with sandboxes("namespaces").open() as sandbox:
        assert isinstance(sandbox, supervised.Supervised)
        await kill_jails()
        with pytest.raises(SandboxError, match=r"does not answer|takes no request"):
            await sandbox.run(Code("print(1)"), deadline_s=DEADLINE_S)


THIEF = """
import os, threading
own = os.open("/proc/self/fd/4", os.O_RDONLY | os.O_NONBLOCK)
def steal():
    while True:
        try:
            os.read(own, 4)
        except BlockingIOError:
            pass
threading.Thread(target=steal, daemon=True).start()
"""


async def test_code_that_takes_its_own_replies_is_no_infrastructure_failure():
    async with sandboxes("namespaces").open() as sandbox:
        for _ in range(4):
            outcome = await sandbox.run(Code(THIEF), deadline_s=1)
            assert outcome.ending in (Ending.EXITED, Ending.DEADLINE)
        await sandbox.run(Command(["true"]), deadline_s=DEADLINE_S)
        assert (await sandbox.run(Code("print(1)"), deadline_s=DEADLINE_S)).stdout == "1\n"


class Killed:
    """The streams of a container that the kernel has killed."""

    async def killed_for_limits(self) -> bool:
        return True

    async def read(self, size: int) -> bytes:
        raise EOFError

    async def write(self, data: bytes) -> None:
        raise BrokenPipeError


async def test_a_sandbox_that_is_killed_for_what_the_code_took_is_an_observation_and_stays_lost():
    sandbox = supervised.Supervised(Killed(), LIMITS)
    for program in (Code("print(1)"), Command(["ls"])):
        outcome = await sandbox.run(program, deadline_s=DEADLINE_S)
        assert (outcome.ending, outcome.exit_status, outcome.state_lost) == (Ending.LOST, None, True)
        assert not outcome.succeeded and outcome.stdout == outcome.stderr == ""
    with pytest.raises(Refused, match="has ended"):
        await sandbox.write_files({"a": b""})
    assert await sandbox.read_files() == {}


HOLDER = """
import asyncio, sys
from services.envs.sandbox.process import ProcessSandboxes
from services.envs.sandbox.sandbox import Command, Limits

async def main():
    sandboxes = ProcessSandboxes(Limits(), max_open=1, allow_network=False, way={way!r})
    async with sandboxes.open() as sandbox:
        print("open", flush=True)
        await sandbox.run(Command(["python3", "-c", "import time; time.sleep(600)", {marker!r}]), deadline_s=600)

asyncio.run(main())
"""


@pytest.mark.parametrize("way", ["namespaces", "landlock"])
def test_nothing_outlives_a_server_that_is_killed(way):
    sandboxes(way)
    marker = f"marker-{uuid.uuid4()}"
    holder = HOLDER.format(way=way, marker=marker)
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "open\n"
        wait_until(lambda: len(running(marker)) >= 2)  # the server's own arguments hold it, too
        server.kill()
    wait_until(lambda: not running(marker))


def wait_until(condition, timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "a\0b", ".", ".."])
async def test_paths_outside_are_refused(path):
    assert not supervised.is_inside(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": "bubblewrap"}, "is not a valid Strength"),
        ({"limits": {"memory_bytes": 1}}, "no interpreter starts"),
        ({"limits": {"processes": 0}}, "at least 1"),
        ({"max_open": 0}, "max_open"),
        ({"strength": "monty", "allow_network": True}, "no network"),
        ({"strenght": "monty"}, "strenght"),
        ({"limits": {"memory": 1}}, "memory"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Choice.parse(options)


def test_a_strength_that_cannot_be_had_is_refused_by_name():
    with pytest.raises(StartupError, match=r"'container' is impossible here: by no-such-runtime: docker"):
        verified(Choice.parse({"strength": "container", "runtime": "no-such-runtime"}))


def test_a_sandbox_that_does_not_isolate_is_found_out():
    """With the network left to it, code does reach a port outside: verification sees what it must."""
    sandboxes("namespaces")
    leaky = ProcessSandboxes(LIMITS, max_open=1, allow_network=True, way="namespaces")
    found = asyncio.run(
        choice.verification.faults(
            leaky, Strength.PROCESS, memory_bytes=4 * LIMITS.memory_bytes // 10, allow_network=False
        )
    )
    assert set(found) == {"it reaches the network", "it takes more memory than its limit"}


def test_the_same_choice_shares_its_slots():
    first = verified(Choice.parse({"strength": "monty", "max_open": 3}))
    assert verified(Choice.parse({"strength": "monty", "max_open": 3})) is first
    assert verified(Choice.parse({"strength": "monty", "max_open": 4})) is not first
    assert Choice.parse({}).limits == Limits()
