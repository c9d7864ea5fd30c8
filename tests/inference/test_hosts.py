"""An engine of two hosts, as two processes over one mesh of two CPU devices."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from headrace.errors import StartupError
from services.inference.hosts import Hosts, check
from services.inference.lockstep import decode, encode
from services.inference.mailbox import Abort, Generate, Swap
from services.inference.request import Request
from tests import processes
from tests.inference import engine as engines
from tests.processes import wait_until

pytestmark = pytest.mark.timeout(400)  # the first start on a machine compiles

MODEL = {"words": [f"w{i}" for i in range(41)], "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
INFERENCE = {
    "context_length": 256,
    "kv_cache_tokens": 1024,
    "max_running_requests": 4,
    "batch_buckets": [4],
    "prefill_chunk_tokens": 64,
    "tensor_parallel": 2,
    "drain_timeout_s": 0.1,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """At version 1. The tests below use it up, in their order."""
    with engines.running(tmp_path_factory.mktemp("hosts"), model=MODEL, inference=INFERENCE, nodes=2) as engine:
        engine.publish(1)
        yield engine


async def test_two_hosts_sample_what_the_model_says(engine):
    prompts = [engine.prompt(length, seed=length) for length in (3, 30, 90, 150)]
    for temperature in (1.0, 0.0):
        for prompt, reply in zip(prompts, await engine.generate(prompts, 30, temperature=temperature), strict=True):
            assert len(reply["output_ids"]) == 30
            assert engine.errors(prompt, reply).max() <= 1e-4


async def test_a_swap_happens_at_the_same_step_on_every_host(engine):
    prompts = [engine.prompt(20, seed) for seed in range(4)]
    for _ in range(5):
        task = asyncio.create_task(engine.generate(prompts, 200))
        await asyncio.to_thread(
            wait_until, lambda task=task: task.done() or engine.get("/get_load")["running"] == 4, timeout_s=60
        )
        await asyncio.to_thread(engine.publish, engine.newest + 1)
        replies = await task
        for prompt, reply in zip(prompts, replies, strict=True):
            # A step whose halves had other weights would be wrong from there on.
            assert engine.errors(prompt, reply).max() <= 1e-4
        if all(len(reply["meta_info"]["policy_versions"]) == 2 for reply in replies):
            break
    else:
        pytest.fail("no swap found all requests running")


async def test_several_hosts_serve_generate_alone(engine):
    assert engine.status("/v1/models") == 404
    assert engine.status("/ready") == 200 and engine.status("/metrics") == 200


async def test_a_host_that_is_told_to_stop_drains_the_engine(engine):
    prompts = [engine.prompt(20, seed) for seed in range(4)]
    task = asyncio.create_task(engine.generate(prompts, 230))
    await asyncio.to_thread(wait_until, lambda: engine.get("/get_load")["running"] == 4, timeout_s=60)
    engine.followers[0].terminate()
    for prompt, reply in zip(prompts, await task, strict=True):
        assert reply["status"] == 200 and 0 < len(reply["output_ids"]) <= 230
        assert engine.errors(prompt, reply).max() <= 1e-4
    for process in (engine.process, *engine.followers):
        assert await asyncio.to_thread(process.wait, 60) == 0


@pytest.mark.slow
def test_a_host_that_dies_ends_the_engine(engine):
    """Whoever started the hosts starts them all again."""
    for process in (engine.process, *engine.followers):
        process.start()
    wait_until(lambda: engine.status("/ready") == 200, timeout_s=120, process=engine.process)
    engine.followers[0].kill()
    assert engine.process.wait(60) != 0
    assert "host 1 of this engine has gone" in engine.process.output


def test_commands_survive_the_wire():
    request = Request("rid", [1, 2], 3, 0.5, [4], False, 5, "6", None)
    for command in (Generate("headrace-0.", request), Abort("headrace-0."), Abort(None), Swap(7)):
        assert decode(encode(command)) == command
    with pytest.raises(ValueError, match="no stock API"):
        encode(object())


@pytest.mark.parametrize(
    ("hosts", "devices", "reason"),
    [
        (Hosts(2, 2, "a:1"), 2, "--node-rank 2 must be from 0 to 1"),
        (Hosts(2, 0, ""), 2, "--coordinator"),
        (Hosts(2, 0, ":5000"), 2, "must name a host"),
        (Hosts(2, 0, "a:65535"), 2, "must name a host and a port from 1 to 65534"),
        (Hosts(2, 0, "a:5000"), 3, "which 2 hosts cannot share evenly"),
    ],
)
def test_hosts_that_cannot_be_are_told(hosts, devices, reason):
    with pytest.raises(StartupError, match=reason):
        check(hosts, devices)


def test_a_wrong_rank_is_told_in_one_line(tmp_path):
    engines.run_file(tmp_path, "127.0.0.1:1", model=MODEL, inference=INFERENCE)
    words = ("--config", str(tmp_path / "run.yaml"), "--listen", "127.0.0.1:0", "--nodes", "2", "--node-rank", "2")
    done = subprocess.run(
        processes.service("inference", *words),
        cwd=processes.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and "error: --node-rank 2 must be from 0 to 1" in done.stderr
