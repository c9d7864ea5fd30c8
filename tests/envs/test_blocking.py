"""services.envs.blocking: bounded worker processes whose hung calls are killed, not leaked."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from services.envs.blocking import WorkerLost, Workers
from services.envs.environment import Environment, Task, TimeStep, user
from tests import processes
from tests.envs import blockers
from tests.envs.conversation import Conversation, reset, say, serving


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def until(condition) -> None:
    async with asyncio.timeout(90):
        while not condition():  # noqa: ASYNC110 - a process tells no event
            await asyncio.sleep(0.02)


async def pids(record: Path) -> list[int]:
    """What `hang` noted."""
    await until(lambda: record.exists() and " " in record.read_text())
    return [int(pid) for pid in record.read_text().split()]  # noqa: ASYNC240


async def test_results_come_back_and_the_worker_is_kept():
    async with Workers(1) as workers:
        first = await workers.call(blockers.process_id)
        assert await workers.call(blockers.double, 21) == 42
        assert await workers.call(blockers.read_input) == ""
        assert await workers.call(bytes, 3_000_000) == bytes(3_000_000)
        assert await workers.call(blockers.process_id) == first != os.getpid()
    assert not alive(first)


async def test_what_a_function_raises_is_raised_here():
    async with Workers(1) as workers:
        for function, arguments, kind, text in [
            (blockers.fail, ("no such door",), LookupError, "no such door"),
            (blockers.sour, (), RuntimeError, "Sour: acidity 7"),
            (blockers.leave, (), RuntimeError, "SystemExit: 3"),
            (blockers.late, (), TimeoutError, "the function's own"),
            (blockers.unpicklable, (), TypeError, "cannot pickle"),
        ]:
            with pytest.raises(kind, match=text) as caught:
                await workers.call(function, *arguments, timeout_s=60)
            if function is blockers.fail:
                assert "blockers.py" in "".join(caught.value.__notes__)
        first = await workers.call(blockers.process_id)
        with pytest.raises((AttributeError, TypeError), match=r"pickle|local"):
            await workers.call(lambda: 1)
        assert await workers.call(blockers.process_id) == first


async def test_a_call_past_its_deadline_is_killed_with_what_it_started(tmp_path):
    async with Workers(1, name="late") as workers:
        before = await workers.call(blockers.process_id)
        with pytest.raises(TimeoutError, match=r"hang took longer than 5 s and was killed"):
            await workers.call(blockers.hang, str(tmp_path / "record"), timeout_s=5)
        worker, child = await pids(tmp_path / "record")
        assert worker == before
        await until(lambda: not alive(worker) and not alive(child))
        assert await workers.call(blockers.process_id) != before
    assert REGISTRY.get_sample_value("headrace_envs_blocking_killed_total", {"environment": "late"}) == 1


async def test_a_cancelled_call_is_killed(tmp_path):
    async with Workers(1) as workers:
        call = asyncio.create_task(workers.call(blockers.hang, str(tmp_path / "record")))
        worker, child = await pids(tmp_path / "record")
        call.cancel()
        await until(lambda: not alive(worker) and not alive(child))
        assert await workers.call(blockers.double, 1) == 2


async def test_a_worker_that_dies_costs_its_call_only():
    async with Workers(1) as workers:
        with pytest.raises(WorkerLost, match="died with exit code 3"):
            await workers.call(blockers.crash)
        with pytest.raises(WorkerLost, match="died of signal 11"):
            await workers.call(signal.raise_signal, signal.SIGSEGV)
        assert await workers.call(blockers.double, 1) == 2


async def test_calls_beyond_the_bound_wait_their_turn(tmp_path):
    async with Workers(2, name="queue") as workers:

        def waiting(what: str) -> float | None:
            return REGISTRY.get_sample_value(f"headrace_envs_blocking_{what}", {"environment": "queue"})

        gates = [tmp_path / str(number) for number in range(4)]
        calls = [asyncio.create_task(workers.call(blockers.wait_for, str(gate))) for gate in gates]
        await until(lambda: (waiting("waiting"), waiting("running")) == (2, 2))
        gates[1].touch()
        assert await calls[1] == str(gates[1])
        gates[2].touch()
        assert await calls[2] == str(gates[2])  # the third took the freed worker, before the fourth
        gates[0].touch()
        gates[3].touch()
        await asyncio.gather(calls[0], calls[3])
        assert (waiting("waiting"), waiting("running")) == (0, 0)
        assert REGISTRY.get_sample_value("headrace_envs_blocking_wait_seconds_count", {"environment": "queue"}) == 4


async def test_the_end_kills_what_runs(tmp_path):
    async with Workers(1) as workers:
        call = asyncio.create_task(workers.call(blockers.hang, str(tmp_path / "record")))
        worker, child = await pids(tmp_path / "record")
    assert not alive(worker)
    await until(lambda: not alive(child))
    with pytest.raises(WorkerLost, match="signal 9"):
        await call


async def test_a_killed_server_leaves_no_worker_and_nothing_that_one_started(tmp_path):
    program = (
        "import asyncio\n"
        "from services.envs.blocking import Workers\n"
        "from tests.envs import blockers\n"
        f"asyncio.run(Workers(1).call(blockers.hang, {str(tmp_path / 'record')!r}))"
    )
    server = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", program], cwd=processes.ROOT
    )
    try:
        worker, child = await pids(tmp_path / "record")
    finally:
        server.kill()
        server.wait()
    await until(lambda: not alive(worker) and not alive(child))


class Blocks(Environment):
    """Blocks at the word "hang"."""

    blocking_workers = 1

    def __init__(self, record: str, timeout_s: float | None = None):
        self._record = record
        self.step_timeout_s = timeout_s

    async def reset(self, task: Task) -> TimeStep:
        return TimeStep([user(str(await self.blocking(blockers.double, 4)))])

    async def step(self, action) -> TimeStep:
        if action.message.content == "hang":
            await self.blocking(blockers.hang, self._record)
        return TimeStep(reward=1.0, terminated=True)


async def test_a_client_that_goes_frees_the_worker_and_others_do_not_wait(tmp_path):
    record = tmp_path / "record"
    offers = {"a": lambda: Blocks(str(record)), "b": lambda: Blocks(str(tmp_path / "other"))}
    async with serving(offers) as (stub, _):
        hung = Conversation(stub)
        assert (await hung.send(reset("a"))).messages[0].content == "8"
        await hung.call.write(say("hang"))
        worker, _ = await pids(record)
        waits = asyncio.create_task(Conversation(stub).send(reset("a")))
        assert (await Conversation(stub).send(reset("b"))).messages[0].content == "8"
        assert not waits.done()
        hung.call.cancel()
        assert (await waits).messages[0].content == "8"
        await until(lambda: not alive(worker))


async def test_the_step_s_deadline_kills_it(tmp_path):
    record = tmp_path / "record"
    async with serving({"a": lambda: Blocks(str(record), timeout_s=6)}) as (stub, _):
        code, details = await Conversation(stub).refusal(reset("a"), say("hang"))
        assert (code.name, details) == ("DEADLINE_EXCEEDED", "step took longer than 6 s")
        worker, _ = await pids(record)
        await until(lambda: not alive(worker))


async def test_without_a_server_it_says_what_to_do():
    with pytest.raises(RuntimeError, match="no executor"):
        await Blocks("").reset(Task())
    with pytest.raises(ValueError, match="at least 1"):
        Workers(0)
