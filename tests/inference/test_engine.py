"""The real engine as a real process on CPU: what it samples, what it says of it, and versions."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import numpy as np
import pytest
from scipy import stats

from tests.inference import engine as engines
from tests.inference import reference
from tests.processes import wait_until

pytestmark = pytest.mark.timeout(400)  # the first start on a machine compiles


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A Qwen3 with heads of 64, an untied head and a prefix cache, at version 1."""
    model = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    inference = {
        "context_length": 512,
        "kv_cache_tokens": 8192,
        "max_running_requests": 16,
        "batch_buckets": [1, 16],
        "prefill_chunk_tokens": 128,
    }
    with engines.running(tmp_path_factory.mktemp("engine"), model=model, inference=inference) as engine:
        assert engine.status("/health") == 200
        assert engine.status("/ready") == 503
        engine.publish(1)
        assert engine.status("/ready") == 200
        engine.programs = asyncio.run(engine.metrics())["headrace_inference_programs_total"]
        yield engine


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("length", [8, 200])
async def test_logprobs_are_those_of_the_model(engine, temperature, length):
    prompts = [engine.prompt(size, seed=size) for size in (1, 5, 33, 150, 290)]  # the last ones are prefilled in chunks
    replies = await engine.generate(prompts, length, temperature=temperature)
    for prompt, reply in zip(prompts, replies, strict=True):
        assert len(reply["output_ids"]) == length
        assert engine.errors(prompt, reply, temperature).max() <= 1e-4


async def test_greedy_takes_the_likeliest_token(engine):
    prompts = [engine.prompt(20, seed) for seed in range(4)]
    for prompt, reply in zip(prompts, await engine.generate(prompts, 30, temperature=0), strict=True):
        logits = reference.logits(
            engine.model, [engine.versions[engine.newest]], [0] * 49, [*prompt, *reply["output_ids"][:-1]]
        )
        assert reply["output_ids"] == logits[19:].argmax(-1).tolist()
        assert engine.errors(prompt, reply).max() <= 1e-4


@pytest.mark.parametrize("seeded", [False, True])
async def test_sampling_follows_the_softmax(engine, seeded):
    prompt, draws = engine.prompt(9, seed=3), 1500
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session:
        seeds = [{"sampling_seed": seed} if seeded else {} for seed in range(draws)]
        replies = await asyncio.gather(*(engine.call(session, prompt, 1, temperature=1.5, **seed) for seed in seeds))
    logits = reference.logits(engine.model, [engine.versions[engine.newest]], [0] * 9, prompt)[-1]
    expected = np.exp(reference.log_softmax(logits / 1.5)) * draws
    found = np.bincount([reply["output_ids"][0] for reply in replies], minlength=len(expected))
    assert chi_square(found, expected) > 1e-4


def chi_square(found: np.ndarray, expected: np.ndarray) -> float:
    """p-value; tokens that are expected fewer than 5 times count as one."""
    rare = expected < 5
    if rare.any():
        found, expected = np.append(found[~rare], found[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    assert len(expected) > 5
    return stats.chisquare(found, expected * found.sum() / expected.sum()).pvalue


async def test_a_seed_decides_and_its_absence_does_not_repeat(engine):
    prompt = engine.prompt(9, seed=4)
    same = await engine.generate([prompt] * 4, 12, sampling_seed=5, temperature=2.0)
    assert len({tuple(reply["output_ids"]) for reply in same}) == 1
    other = await engine.generate([prompt] * 8, 12, temperature=2.0)
    assert len({tuple(reply["output_ids"]) for reply in other}) == 8


async def test_a_stop_token_ends_the_reply_and_is_part_of_it(engine):
    prompt = engine.prompt(12, seed=6)
    ids = (await engine.generate([prompt], 10, temperature=0))[0]["output_ids"]
    stop = ids[4]
    first = ids.index(stop) + 1
    for limit in (10, first):  # also when the limit is reached with it
        reply = (await engine.generate([prompt], limit, temperature=0, stop_token_ids=[stop], ignore_eos=False))[0]
        assert reply["output_ids"] == ids[:first]
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_versions_across_a_swap_name_the_weights_that_sampled_each_token(engine):
    prompts = [engine.prompt(30, seed) for seed in (10, 11, 12)]
    for _ in range(5):
        running = asyncio.create_task(engine.generate(prompts, 400))
        await asyncio.to_thread(wait_until, lambda: engine.get("/get_load")["running"] == 3, timeout_s=20)
        await asyncio.to_thread(engine.publish, engine.newest + 1)
        replies = await running
        split = all(len(reply["meta_info"]["policy_versions"]) == 2 for reply in replies)
        for prompt, reply in zip(prompts, replies, strict=True):
            # Exact, token by token: keys of earlier positions stay what the old weights made them.
            assert engine.errors(prompt, reply).max() <= 1e-4
        if split:
            return
    pytest.fail("no request was running during any of five swaps")


async def test_swaps_under_load_lose_nothing_and_namespaces_follow(engine):
    prompts = [engine.prompt(24, seed) for seed in range(20, 50)] * 4
    running = asyncio.create_task(engine.generate(prompts, 60))
    for _ in range(6):
        await asyncio.to_thread(engine.publish, engine.newest + 1)
    replies = await running
    used = set()
    for reply in replies:
        assert reply["status"] == 200 and len(reply["output_ids"]) == 60
        spans = reply["meta_info"]["policy_versions"]
        assert spans == sorted(spans) and int(reply["meta_info"]["extra_key"]) <= spans[0][0]
        used |= {version for version, _ in spans}
    assert len(used) > 1
    # Nothing that older weights computed is found by a new request.
    for prompt, reply in zip(prompts[:30], await engine.generate(prompts[:30], 4), strict=True):
        assert reply["meta_info"]["policy_versions"] == [[engine.newest, 4]]
        assert engine.errors(prompt, reply).max() <= 1e-4


@pytest.mark.parametrize("busy", [False, True])
async def test_a_prefix_is_never_reused_across_versions(engine, busy):
    prompt = engine.prompt(200, seed=60 + busy)
    first = (await engine.generate([prompt], 4))[0]["meta_info"]
    again = (await engine.generate([prompt], 4))[0]
    assert first["cached_tokens"] == 0 and again["meta_info"]["cached_tokens"] > 150
    assert engine.errors(prompt, again).max() <= 1e-4
    old = str(engine.newest)
    assert first["extra_key"] == old
    running = asyncio.create_task(engine.generate([prompt] * busy, 250))
    if busy:
        await asyncio.to_thread(wait_until, lambda: engine.get("/get_load")["running"] == 1, timeout_s=20)
    await asyncio.to_thread(engine.publish, engine.newest + 1)
    for cached in (0, 150):
        reply = (await engine.generate([prompt], 4))[0]
        assert reply["meta_info"]["extra_key"] == str(engine.newest)
        assert (reply["meta_info"]["cached_tokens"] > 150) == bool(cached)
        assert engine.errors(prompt, reply).max() <= 1e-4
    # A later turn of an episode that began under the old version finds its own prefix.
    later = (await engine.generate([prompt], 4, extra_key=old))[0]["meta_info"]
    assert later["cached_tokens"] > 150 and later["extra_key"] == old
    await running
    after = (await engine.generate([prompt], 4))[0]
    assert engine.errors(prompt, after).max() <= 1e-4


async def test_later_turns_find_their_prefix_and_agree_with_a_cold_computation(engine):
    episodes, keys = [engine.prompt(20 + seed, seed) for seed in range(100, 108)], [{}] * 8
    for turn in range(4):
        replies = await asyncio.gather(
            *(engine.generate([episode], 12, **key) for episode, key in zip(episodes, keys, strict=True))
        )
        for number, (reply,) in enumerate(replies):
            assert engine.errors(episodes[number], reply).max() <= 1e-4
            # All but this turn's observation and the last sampled token, whose keys nobody needed before.
            assert not turn or reply["meta_info"]["cached_tokens"] == len(episodes[number]) - 10
            episodes[number] = [*episodes[number], *reply["output_ids"], *engine.prompt(9, seed=turn)]
        keys = [{"extra_key": reply["meta_info"]["extra_key"]} for (reply,) in replies]


async def test_a_turn_of_an_episode_from_the_future_leaves_nothing_behind(engine):
    prompt, ahead = engine.prompt(200, seed=70), engine.newest + 3
    early = (await engine.generate([prompt], 4, extra_key=str(ahead)))[0]
    assert early["meta_info"]["extra_key"] == str(ahead)
    assert engine.errors(prompt, early).max() <= 1e-4
    await asyncio.to_thread(engine.publish, ahead)
    reply = (await engine.generate([prompt], 4))[0]
    assert reply["meta_info"]["cached_tokens"] == 0
    assert engine.errors(prompt, reply).max() <= 1e-4


async def test_a_request_waits_for_the_version_that_it_demands(engine):
    prompt, demanded = engine.prompt(8, seed=80), engine.newest + 2
    waiting = asyncio.create_task(engine.generate([prompt], 3, min_policy_version=demanded))
    await asyncio.to_thread(engine.publish, demanded - 1)
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await asyncio.to_thread(engine.publish, demanded)
    assert (await waiting)[0]["meta_info"]["policy_versions"] == [[demanded, 3]]
    old = (await engine.generate([prompt], 3, min_policy_version=1))[0]
    assert old["meta_info"]["policy_versions"] == [[demanded, 3]]


async def test_a_held_engine_keeps_its_version_until_released(engine):
    held, prompt = engine.newest, engine.prompt(8, seed=82)
    assert await engine.hold({"hold_s": 60}) == (200, {"policy_version": held, "hold_s": 60})
    await asyncio.to_thread(engine.publish, held + 1, wait=False)
    await asyncio.sleep(0.3)  # that nothing happens is under test
    assert (await engine.generate([prompt], 3))[0]["meta_info"]["policy_versions"] == [[held, 3]]
    assert (await engine.hold({"hold_s": 0}))[0] == 200
    released = (await engine.generate([prompt], 3, min_policy_version=held + 1))[0]
    assert released["meta_info"]["policy_versions"] == [[held + 1, 3]]
    for wrong in ({}, [], {"hold_s": -1}, {"hold_s": True}, {"hold_s": "1"}, {"hold_s": 1e9}):
        status, answer = await engine.hold(wrong)
        assert status == 400
        assert "hold_s" in answer["error"]["message"]


async def test_an_aborted_request_returns_what_it_sampled(engine):
    prompt = engine.prompt(8, seed=81)
    running = asyncio.create_task(engine.generate([prompt], 450, rid="mine"))
    await asyncio.to_thread(wait_until, lambda: engine.get("/get_load")["running"] == 1, timeout_s=20)
    async with aiohttp.ClientSession() as session:
        assert (await session.post(engine.url + "/abort_request", json={"rid": ["mine"]})).status == 400
        await session.post(engine.url + "/abort_request", json={"rid": "mine"})
    reply = (await running)[0]
    assert reply["meta_info"]["finish_reason"]["type"] == "abort" and reply["meta_info"]["id"] == "mine"
    assert 0 < len(reply["output_ids"]) < 450
    assert engine.errors(prompt, reply).max() <= 1e-4


async def test_a_client_that_leaves_frees_its_place(engine):
    running = asyncio.create_task(engine.generate([engine.prompt(8, seed) for seed in range(24)], 450))
    await asyncio.to_thread(wait_until, lambda: engine.get("/get_load")["waiting"] > 0, timeout_s=20)
    running.cancel()
    started = time.monotonic()
    await asyncio.to_thread(
        wait_until,
        lambda: (load := engine.get("/get_load"))["running"] + load["waiting"] + load["kv_used_tokens"] == 0,
        timeout_s=20,
    )
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "no JSON"),
        (b"[]", "must be an object"),
        (b'{"input_ids": []}', "input_ids is empty"),
        (b'{"input_ids": "abc"}', "list of token ids"),
        (b'{"input_ids": [1, true]}', "list of token ids"),
        (b'{"input_ids": [1, 100000]}', "outside 0.."),
        (b'{"input_ids": [-1]}', "outside 0.."),
        (b'{"input_ids": [1], "sampling_params": {"temperature": -1}}', "temperature"),
        (b'{"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}', "max_new_tokens"),
        (b'{"input_ids": [1], "sampling_params": {"max_new_tokens": 600}}', "together pass"),
        (b'{"input_ids": [1], "sampling_params": {"top_p": 0.5}}', "top_p"),
        (b'{"input_ids": [1], "sampling_params": {"sampling_seed": 1.5}}', "sampling_seed"),
        (b'{"input_ids": [' + b"5," * 510 + b"5]}", "at most"),
    ],
)
async def test_a_wrong_request_is_told_what_is_wrong(engine, body, reason):
    async with aiohttp.ClientSession() as session, session.post(engine.url + "/generate", data=body) as response:
        assert response.status == 400
        assert reason in (await response.json())["error"]["message"]


async def test_the_longest_request_is_served(engine):
    prompt = engine.prompt(505, seed=82)
    reply = (await engine.generate([prompt], 5))[0]
    assert reply["status"] == 200 and engine.errors(prompt, reply).max() <= 1e-4


async def test_load_and_metrics_tell_what_happens(engine):
    await engine.generate([engine.prompt(10, seed=83)], 20)
    assert engine.get("/get_load") == {
        "policy_version": engine.newest,
        "running": 0,
        "waiting": 0,
        "kv_used_tokens": 0,
        "kv_capacity_tokens": 8192,
    }
    version = engine.get("/policy_version")
    assert version["run_id"] == "test" and len(version["root_hash"]) == 32
    values = await engine.metrics()
    assert values["headrace_inference_policy_version"] == engine.newest
    assert values["headrace_inference_generated_tokens_total"] >= 20
    assert values["headrace_inference_prompt_tokens_total"] >= 10
    assert values["headrace_inference_kv_capacity_tokens"] == 8192
    assert values['headrace_inference_pulls_total{outcome="ok"}'] == len(engine.versions)
    assert values["headrace_inference_swap_seconds_count"] == len(engine.versions)
    assert values['headrace_inference_requests_total{status="200"}'] >= 1


async def test_nothing_is_compiled_once_the_engine_is_ready(engine):
    """All that the tests above have asked of /generate came from programs that were built before readiness."""
    assert (await engine.metrics())["headrace_inference_programs_total"] == engine.programs


async def test_chat_completions_and_other_stock_routes_remain(engine):
    body = {"model": "any", "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 60, "logprobs": True}
    async with aiohttp.ClientSession() as session:
        async with session.post(engine.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200
            reply = await response.json()
        assert reply["usage"]["completion_tokens"] >= 1
        stock = {"input_ids": engine.prompt(8, 84), "sampling_params": {"max_new_tokens": 120, "ignore_eos": True}}
        async with session.post(engine.url + "/sglang/generate", json={**stock, "return_logprob": True}) as response:
            meta = (await response.json())["meta_info"]
    assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == 120


async def test_requests_to_stock_routes_share_a_batch_with_ours(engine):
    prompts = [engine.prompt(8 + seed, seed) for seed in range(120, 126)]
    stock = {"input_ids": engine.prompt(8, 84), "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
    kinds = [{}, {"return_logprob": True}, {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}]
    async with aiohttp.ClientSession() as session:
        ours = asyncio.create_task(engine.generate(prompts, 100))
        for _ in range(3):
            replies = await asyncio.gather(
                *(session.post(engine.url + "/sglang/generate", json=stock | kind) for kind in kinds)
            )
            metas = [(await reply.json())["meta_info"] for reply in replies]
            assert [meta["completion_tokens"] for meta in metas] == [40, 40, 40]
            assert [len(meta.get("output_token_logprobs", ())) for meta in metas] == [0, 40, 40]
            assert len(metas[2]["input_token_logprobs"]) == 8 and len(metas[2]["output_top_logprobs"]) == 40
        for prompt, reply in zip(prompts, await ours, strict=True):
            assert engine.errors(prompt, reply).max() <= 1e-4


@pytest.mark.parametrize("route", ["pause_generation", "continue_generation", "release_memory_occupation"])
async def test_routes_that_would_stop_the_engine_are_refused(engine, route):
    async with aiohttp.ClientSession() as session:
        for body in ({}, {"mode": "retract"}, {"mode": "in_place"}):
            async with session.post(f"{engine.url}/{route}", json=body) as response:
                assert response.status == 400
                assert "refused" in (await response.json())["error"]["message"]
    assert (await engine.generate([engine.prompt(8, seed=85)], 2))[0]["status"] == 200


def test_an_idle_engine_sleeps(engine):
    time.sleep(0.5)
    before = engine.cpu_s()
    time.sleep(2)
    assert engine.cpu_s() - before < 0.2
