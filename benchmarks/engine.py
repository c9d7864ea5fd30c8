"""What the engine makes of a CPU: `python -m benchmarks.engine` (about four minutes on two quiet cores).

One Qwen3 of 4 layers, width 256, heads of 128 and 512 tokens of vocabulary, each request 32 tokens of prompt and 64 new
ones with log-probabilities, at 1, 16 and 64 requests at once:

    ours     our engine as it is, at /generate
    rival    the same release of SGLang-JAX as released, same settings, at its own /generate
    limit    one jitted loop of the same model and nothing else (pure_decode.py)

Then, on our engine: what a swap of weights costs 16 running requests, and how many short turns (256 episodes of four
turns of two tokens, two layers of width 64) it answers a second. Each server is a process of its own, one at a time;
clients share the cores with it, as gateways do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks import results
from benchmarks.results import Figure
from tests import processes
from tests.inference import engine as engines
from tests.inference import reference
from tests.processes import ROOT

PROMPT, NEW = 32, 64
CONCURRENCY = (1, 16, 64)
WORDS = [f"w{number}" for number in range(505)]  # 512 with the special tokens
MODEL = {
    "words": WORDS,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
}
INFERENCE = {
    "context_length": 256,
    "kv_cache_tokens": 8192,
    "max_running_requests": 64,
    "batch_buckets": [1, 16, 64],
    "prefill_chunk_tokens": 256,
    "prefix_cache": False,
}
SHORT_MODEL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
EPISODES, TURNS, TURN_TOKENS = 256, 4, 2
SWAPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__.split("\n")[0])
    parser.add_argument("--without-rival", action="store_true", help="leave the released engine out")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(rival=not arguments.without_rival))
    rows = [[each.metric, *map(_cell, (each.ours, each.rival, each.limit)), each.unit] for each in figures]
    print(results.table(["", "ours", "as released", "pure decode", ""], rows))
    results.write("engine", figures)


async def measure(*, rival: bool) -> list[Figure]:
    """All figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ours(folder / "decode", MODEL, INFERENCE) as engine:
            speeds = await decode_speeds(engine.url)
            swap = await swaps(engine)
        model = folder / "decode" / "test" / "model"
        limits = {batch: pure_decode(model, batch) for batch in CONCURRENCY}
        rivals: dict[int, float] = {}
        if rival:
            with as_released(model, folder / "rival.log") as url:
                rivals = await decode_speeds(url)
        with ours(folder / "short", SHORT_MODEL, {**INFERENCE, "prefix_cache": True}) as engine:
            turns = await short_turns(engine)
    return [
        *(
            Figure(f"decode_{batch}_tokens_per_s", speeds[batch], rivals.get(batch), limits[batch], "1/s")
            for batch in CONCURRENCY
        ),
        *swap,
        Figure("short_turns_per_s", turns, None, None, "1/s"),
    ]


@contextlib.contextmanager
def ours(folder: Path, model: dict[str, Any], inference: dict[str, Any]) -> Iterator[engines.Engine]:
    """Our engine, at version 1."""
    folder.mkdir()
    with engines.running(folder, model=model, inference=inference) as engine:
        engine.publish(1, reference.random_weights(engine.model, seed=1, scale=0.08))
        yield engine


@contextlib.contextmanager
def as_released(model: Path, log: Path) -> Iterator[str]:
    """The released engine's own server with the settings of ours; yields its url."""
    port = processes.free_port()
    command = [
        *(sys.executable, "-m", "sgl_jax.launch_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model-path", str(model), "--load-format", "dummy", "--device", "cpu", "--dtype", "float32"),
        *("--context-length", "256", "--max-total-tokens", "8192", "--max-running-requests", "64"),
        *("--precompile-bs-paddings", "1", "16", "64", "--precompile-token-paddings", "64", "256"),
        *("--chunked-prefill-size", "256", "--page-size", "1", "--disable-radix-cache", "--tp-size", "1"),
        *("--attention-backend", "native", "--enable-single-process", "--grammar-backend", "none"),
        # Its own first request wants no log-probabilities: beside one of ours that ends the released scheduler.
        *("--log-level", "warning", "--skip-server-warmup"),
    ]
    environment = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax-tests")}
    with processes.running(
        command, log, ready=lambda: processes.listening(port), timeout_s=180, environment=environment
    ):
        yield f"http://127.0.0.1:{port}"


def pure_decode(model: Path, batch: int) -> float:
    """Tokens a second of the jitted loop, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.pure_decode", str(model), str(batch)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])["tokens_per_s"]


async def decode_speeds(url: str) -> dict[int, float]:
    """Tokens a second by requests at once, the best of three rounds after one that does not count."""
    speeds = {}
    # The released server cuts connections that were idle for five seconds, at times as a request comes.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        for batch in CONCURRENCY:
            times_s = [await round_s(session, url, batch) for _ in range(4)]
            speeds[batch] = batch * NEW / min(times_s[1:])
    return speeds


async def round_s(session: aiohttp.ClientSession, url: str, batch: int) -> float:
    """Seconds that so many requests take when sent at once."""
    draw = np.random.default_rng()
    bodies = [body(draw.integers(4, 500, PROMPT).tolist(), NEW) for _ in range(batch)]
    start_s = time.perf_counter()
    for reply in await asyncio.gather(*(post(session, url, each) for each in bodies)):
        assert reply["meta_info"]["completion_tokens"] == NEW
    return time.perf_counter() - start_s


async def swaps(engine: engines.Engine) -> list[Figure]:
    """What swaps cost 16 requests that run all the while: time on the scheduler's thread, and tokens that are lost."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(post(session, engine.url, body([5] * PROMPT, 4)) for _ in range(16)))
        before = await engine.metrics()
        asked = 0
        lost = 0
        versions = iter(range(2, 2 + SWAPS))
        tensors = [reference.random_weights(engine.model, seed=seed, scale=0.08) for seed in (1, 2)]
        publishing = asyncio.create_task(_publish(engine, versions, tensors))
        while not publishing.done():
            replies = await asyncio.gather(*(post(session, engine.url, body([5] * PROMPT, 200)) for _ in range(16)))
            asked += 200 * len(replies)
            lost += sum(200 - reply["meta_info"]["completion_tokens"] for reply in replies)
        await publishing
        after = await engine.metrics()

    def mean(name: str) -> float:
        counts = after[f"{name}_count"] - before[f"{name}_count"]
        return (after[f"{name}_sum"] - before[f"{name}_sum"]) / counts

    return [
        Figure("swap_pause_ms", 1e3 * mean("headrace_inference_swap_seconds"), None, None, "ms"),
        Figure("swap_stage_ms", 1e3 * mean("headrace_inference_stage_seconds"), None, None, "ms"),
        Figure("swap_lost_tokens", float(lost), None, float(asked), "tokens"),
    ]


async def _publish(engine: engines.Engine, versions: Iterator[int], tensors: list[dict[str, np.ndarray]]) -> None:
    for version in versions:
        await asyncio.to_thread(engine.publish, version, tensors[version % 2])


async def short_turns(engine: engines.Engine) -> float:
    """Requests a second, in the best of three rounds after one that does not count."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def episode(seed: int) -> None:
            tokens = engine.prompt(16, seed)
            key: dict[str, str] = {}
            for _ in range(TURNS):
                reply = await post(session, engine.url, body(tokens, TURN_TOKENS, **key))
                key = {"extra_key": reply["meta_info"]["extra_key"]}
                tokens = [*tokens, *reply["output_ids"], 5, 6, 7]

        times_s = []
        for number in range(4):
            start_s = time.perf_counter()
            await asyncio.gather(*(episode(seed + EPISODES * number) for seed in range(EPISODES)))
            times_s.append(time.perf_counter() - start_s)
    return EPISODES * TURNS / min(times_s[1:])


async def post(session: aiohttp.ClientSession, url: str, data: bytes) -> dict[str, Any]:
    """A reply of /generate."""
    async with session.post(f"{url}/generate", data=data, headers={"Content-Type": "application/json"}) as response:
        text = await response.read()
        assert response.status == 200, text
        return json.loads(text)


def body(tokens: list[int], new: int, **keys: Any) -> bytes:
    """A request of /generate that samples so many tokens."""
    sampling = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
    return json.dumps({"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, **keys}).encode()


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"
    main()
