"""Supervision of a child process, with real children."""

import asyncio
import os
import signal
import sys
import time

import pytest

from headrace.process import USER_ERROR, Command, Process
from tests.processes import wait_until


def child(tmp_path, program: str, **options) -> tuple[Process, list[str]]:
    lines: list[str] = []
    command = Command("child", (sys.executable, "-c", program), tmp_path / "child.log", grace_s=1.0, **options)
    return Process(command, report=lines.append, started=lambda: None), lines


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - it waits for the operating system
            await asyncio.sleep(0.02)


async def test_a_command_that_ends_is_not_started_again(tmp_path):
    process, lines = child(tmp_path, "pass", ends=True)
    assert await process.keep_running() == 0
    assert (process.restarts, lines) == (0, [])


async def test_a_command_gets_its_variables_unless_the_launcher_has_them(tmp_path):
    program = "import os; print('error:', os.environ['PATH'], os.environ['THEIRS'])"
    process, _ = child(tmp_path, program, ends=True, environment={"PATH": "command's", "THEIRS": "command's"})
    assert await process.keep_running() == 0
    assert process.errors() == [f"{os.environ['PATH']} command's"]


async def test_a_user_error_is_told_and_not_tried_again(tmp_path):
    program = "import sys; print('noise'); print('error: key: wrong; do this', file=sys.stderr); sys.exit(2)"
    process, _ = child(tmp_path, program)
    assert await process.keep_running() == USER_ERROR
    assert process.errors() == ["key: wrong; do this"]
    assert process.restarts == 0


async def test_a_dead_child_is_started_again_and_said_so(tmp_path):
    process, lines = child(tmp_path, "import time; time.sleep(60)")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(process.keep_running())
        await until(lambda: process.pid is not None)
        first = process.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: process.pid not in (None, first))
        assert process.restarts == 1
        assert lines == ["child was killed by SIGKILL; starting it again (1 of 5)"]
        await process.stop()
    assert process.pid is None


async def test_a_child_that_ignores_sigterm_is_killed_with_its_children(tmp_path):
    program = (
        "import pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "grandchild = subprocess.Popen([sys.executable, '-c', 'import signal, time;"
        " signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(f'{{grandchild.pid}}\\n')\n"
        "time.sleep(60)\n"
    )
    process, lines = child(tmp_path, program)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(process.keep_running())
        await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
        began = time.monotonic()
        await process.stop()
        assert 0.9 < time.monotonic() - began < 5
    assert task.result() == -signal.SIGKILL
    assert "killing it" in lines[0]
    grandchild = int((tmp_path / "pid").read_text())
    await until(lambda: not alive(grandchild))


async def test_stop_during_the_pause_before_a_restart_ends_it(tmp_path):
    process, lines = child(tmp_path, "raise SystemExit(3)")
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(process.keep_running())
        await until(lambda: len(lines) == 2)
        await process.stop()
    assert task.result() == 3


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_a_child_dies_with_a_parent_that_is_killed(tmp_path):
    program = (
        "import asyncio, pathlib, sys\n"
        "from headrace.process import Command, Process\n"
        f"log = pathlib.Path({str(tmp_path / 'child.log')!r})\n"
        "command = Command('child', (sys.executable, '-c', 'import time; time.sleep(60)'), log, 1.0)\n"
        "process = Process(command, report=print, started=lambda: print(process.pid, flush=True))\n"
        "asyncio.run(process.keep_running())\n"
    )
    from tests.processes import Process as TestProcess

    parent = TestProcess([sys.executable, "-c", program], tmp_path / "parent.log")
    wait_until(lambda: parent.output.endswith("\n"), timeout_s=20, process=parent)
    pid = int(parent.output)
    assert alive(pid)
    os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid), timeout_s=5)
    parent.kill()
