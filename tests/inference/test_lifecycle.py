"""An engine from start to end: another architecture, drain, restart, and what users get wrong."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess

import aiohttp
import numpy as np
import pytest

from tests import processes
from tests.inference import engine as engines
from tests.processes import wait_until

LLAMA = {
    "architecture": "LlamaForCausalLM",
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_theta": 500_000.0,
}
PAGED = {
    "page_size": 16,
    "kv_cache_tokens": 4096,
    "max_running_requests": 8,
    "batch_buckets": [8],
    "prefill_chunk_tokens": 64,
    "drain_timeout_s": 20,
}

pytestmark = pytest.mark.timeout(400)  # the first start on a machine compiles


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A Llama with heads of 32 in pages of 16 slots. The tests below use it up, in their order."""
    with engines.running(tmp_path_factory.mktemp("engine"), model=LLAMA, inference=PAGED) as engine:
        yield engine


async def test_without_weights_it_lives_but_is_not_ready(engine):
    assert engine.status("/health") == 200 and engine.status("/ready") == 503
    assert engine.status("/v1/models") == 503
    reply = (await engine.generate([engine.prompt(4, seed=0)], 2))[0]
    assert reply["status"] == 503 and "no weights yet" in reply["error"]["message"]
    waiting = asyncio.create_task(engine.generate([engine.prompt(4, seed=0)], 2, min_policy_version=1))
    await asyncio.to_thread(engine.publish, 1)
    assert (await waiting)[0]["meta_info"]["policy_versions"] == [[1, 2]]
    assert engine.status("/ready") == 200 and engine.status("/v1/models") == 200


async def test_llama_in_pages_agrees_with_the_reference_before_and_after_a_swap(engine):
    prompts = [engine.prompt(size, seed=size) for size in (1, 16, 17, 100)]
    for version in (1, 2):
        if version == 2:
            await asyncio.to_thread(engine.publish, 2)
        for _ in range(2):  # the second time the prefix is cached
            replies = await engine.generate(prompts, 20)
            for prompt, reply in zip(prompts, replies, strict=True):
                assert reply["meta_info"]["policy_versions"] == [[version, 20]]
                assert engine.errors(prompt, reply).max() <= 1e-4
        assert replies[3]["meta_info"]["cached_tokens"] == 96


async def test_sigterm_lets_running_requests_end_and_refuses_others(engine):
    prompt = engine.prompt(4, seed=1)
    running = asyncio.create_task(engine.generate([prompt] * 3, 120))
    stock = asyncio.create_task(stock_reply(engine, prompt, 240))
    held = asyncio.create_task(engine.generate([prompt], 2, min_policy_version=99))
    await asyncio.to_thread(wait_until, lambda: engine.get("/get_load")["running"] == 4, timeout_s=20)
    engine.process.terminate()
    await asyncio.to_thread(wait_until, lambda: engine.status("/ready") == 503, timeout_s=5)
    refused = await engine.generate([prompt], 2)
    assert refused[0]["status"] == 503 and "draining" in refused[0]["error"]["message"]
    assert (await held)[0]["status"] == 503
    for reply in await running:
        assert reply["status"] == 200 and len(reply["output_ids"]) == 120
        assert engine.errors(prompt, reply).max() <= 1e-4
    assert (await stock)["meta_info"]["completion_tokens"] == 240
    assert await asyncio.to_thread(engine.process.wait, 20) == 0


async def stock_reply(engine, prompt, new):
    """What the stock application answers."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": new, "ignore_eos": True}}
    async with aiohttp.ClientSession() as session, session.post(engine.url + "/sglang/generate", json=body) as response:
        return await response.json()


def test_weights_that_do_not_fit_end_a_restarted_engine_with_one_line(engine):
    engine.process.start()
    wait_until(lambda: engine.status("/ready") == 200, timeout_s=120, process=engine.process)
    assert engine.get("/policy_version")["policy_version"] == 2
    tensors = {**engine.versions[2], "model.embed_tokens.weight": np.zeros((99, 48), np.float32)}
    engine.publish(3, tensors, wait=False)
    assert engine.process.wait(30) == 2
    last = engine.process.output.splitlines()[-1]
    assert last.startswith("error: the trainer's weights do not fit the model in ") and "(99, 48)" in last


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("id: test", "id: ''"), "run.id: is empty; set it"),
        (("address: 127.0.0.1:1", "address: ''"), "trainer.address: is empty"),
        (("page_size: 1", "page_size: 0"), "inference.page_size"),
        (("kv_cache_tokens:", "kv_cash_tokens:"), "inference.kv_cash_tokens: unknown key"),
    ],
)
def test_a_wrong_run_file_is_told_in_one_line_each(tmp_path, change, reason):
    engines.run_file(tmp_path, "127.0.0.1:1", model={}, inference={})
    path = tmp_path / "run.yaml"
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    _fails("--config", str(path), "--listen", "127.0.0.1:0", reason=reason)


def test_a_taken_port_and_a_broken_model_folder_are_told(tmp_path):
    settings = engines.run_file(tmp_path, "127.0.0.1:1", model={}, inference={})
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        _fails("--config", str(tmp_path / "run.yaml"), "--listen", listen, reason=f"--listen {listen} cannot be bound")
    _fails("--config", str(tmp_path / "run.yaml"), "--listen", "127.0.0.1:99999", reason="'127.0.0.1:99999' is no HOST")
    (settings.model_path / "config.json").write_text("{")
    _fails("--config", str(tmp_path / "run.yaml"), "--listen", "127.0.0.1:0", reason="config.json")


def _fails(*arguments: str, reason: str) -> None:
    done = subprocess.run(
        processes.service("inference", *arguments),
        cwd=processes.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and reason in errors[0], done.stderr
    assert "Traceback" not in done.stderr
