"""Two engines at once: one that recomputes running requests at a swap, and one that hands its requests over to it."""

from __future__ import annotations

import asyncio
import random

import aiohttp
import numpy as np
import pytest

from tests.inference import engine as engines
from tests.inference.soak import soak
from tests.processes import wait_until

pytestmark = pytest.mark.timeout(400)  # the first start on a machine compiles

MODEL = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
# As in test_engine.py, so that what it has compiled serves here too.
INFERENCE = {
    "context_length": 512,
    "kv_cache_tokens": 8192,
    "max_running_requests": 16,
    "batch_buckets": [1, 16],
    "prefill_chunk_tokens": 128,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(recomputes at a swap, leaves soon after SIGTERM), both at version 1 with the same weights."""
    with (
        engines.running(
            tmp_path_factory.mktemp("recomputing"), model=MODEL, inference={**INFERENCE, "update": "recompute"}
        ) as recomputing,
        engines.running(
            tmp_path_factory.mktemp("leaving"),
            model=MODEL,
            inference={**INFERENCE, "drain_timeout_s": 0.1},
        ) as leaving,
    ):
        recomputing.publish(1)
        leaving.publish(1)
        yield recomputing, leaving


async def running_at_a_swap(engine, prompts, new, **options):
    """Replies that a swap found running, all of them."""
    for _ in range(8):
        task = asyncio.create_task(engine.generate(prompts, new, **options))
        await running(engine, task, len(prompts))
        await asyncio.to_thread(engine.publish, engine.newest + 1)
        replies = await task
        if all(len(reply["meta_info"]["policy_versions"]) == 2 for reply in replies):
            return replies
    pytest.fail("no swap found all requests running")


async def running(engine, task, requests):
    """Returns when the engine computes so many requests, or the task is done."""
    await asyncio.to_thread(
        wait_until, lambda: task.done() or engine.get("/get_load")["running"] == requests, timeout_s=60
    )


async def test_recompute_samples_from_keys_of_the_new_weights_alone(pair):
    engine, _ = pair
    prompts = [engine.prompt(length, seed=length) for length in (3, 150, 60)]
    before = (await engine.metrics())["headrace_inference_recomputed_tokens_total"]
    for prompt, reply in zip(prompts, await running_at_a_swap(engine, prompts, 250), strict=True):
        assert len(reply["output_ids"]) == 250
        # Exact, token by token: what was sampled before keeps its stamp and logprob, what came after is what a server
        # samples that never saw other weights.
        assert engine.errors(prompt, reply).max() <= 1e-4
    assert (await engine.metrics())["headrace_inference_recomputed_tokens_total"] >= before + sum(map(len, prompts))


async def test_recompute_continues_greedily_like_a_cold_server(pair):
    engine, _ = pair
    prompt = engine.prompt(40, seed=2)
    reply = (await running_at_a_swap(engine, [prompt], 300, temperature=0))[0]
    old = reply["meta_info"]["policy_versions"][0][1]
    cold = (await engine.generate([[*prompt, *reply["output_ids"][:old]]], 300 - old, temperature=0))[0]
    assert cold["output_ids"] == reply["output_ids"][old:]


async def test_recompute_never_reuses_a_prefix_of_other_weights(pair):
    engine, _ = pair
    prompt = engine.prompt(200, seed=3)
    first = (await engine.generate([prompt], 4))[0]
    episode = [*prompt, *first["output_ids"], *engine.prompt(5, seed=4)]
    key = first["meta_info"]["extra_key"]
    assert (await engine.generate([episode], 4, extra_key=key))[0]["meta_info"]["cached_tokens"] > 150
    await asyncio.to_thread(engine.publish, engine.newest + 1)
    for cached in (0, 150):
        reply = (await engine.generate([episode], 4, extra_key=key))[0]
        assert (reply["meta_info"]["cached_tokens"] > 150) == bool(cached)
        assert reply["meta_info"]["extra_key"] == key
        assert engine.errors(episode, reply).max() <= 1e-4


async def test_recompute_under_load_loses_nothing_nor_do_aborts(pair):
    engine, _ = pair
    draw = random.Random(5)
    prompts = [engine.prompt(draw.randint(1, 80), seed) for seed in range(20)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [
            asyncio.create_task(engine.call(session, prompt, 80, rid=f"load-{number}"))
            for number, prompt in enumerate(prompts)
        ]
        for number in range(9):
            if number % 3 == 0:
                await asyncio.to_thread(engine.publish, engine.newest + 1)
            async with session.post(engine.url + "/abort_request", json={"rid": f"load-{2 * number}"}) as response:
                assert response.status == 200
        replies = await asyncio.gather(*tasks)
    whole = 0
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply["status"] == 200
        whole += len(reply["output_ids"]) == 80
        assert reply["meta_info"]["finish_reason"]["type"] == ("length" if len(reply["output_ids"]) == 80 else "abort")
        assert not reply["output_ids"] or engine.errors(prompt, reply).max() <= 1e-4
    assert whole >= 11
    load = engine.get("/get_load")
    assert (load["running"], load["waiting"], load["kv_used_tokens"]) == (0, 0, 0)


async def test_two_engines_on_different_versions_label_what_each_samples(pair):
    ahead, behind = pair
    assert ahead.newest > behind.newest
    prompts = [ahead.prompt(20, seed) for seed in range(30, 38)]
    mixed = await asyncio.gather(*(engine.generate(prompts, 30) for engine in (ahead, behind)))
    for engine, replies in zip((ahead, behind), mixed, strict=True):
        for prompt, reply in zip(prompts, replies, strict=True):
            assert reply["meta_info"]["policy_versions"] == [[engine.newest, 30]]
            assert engine.errors(prompt, reply).max() <= 1e-4
    # An episode that began on the one ahead goes on at the other, which must not offer what it computes as version N.
    key = mixed[0][0]["meta_info"]["extra_key"]
    later = (await behind.generate([prompts[0]], 4, extra_key=key))[0]
    assert later["meta_info"]["policy_versions"] == [[behind.newest, 4]]
    assert behind.errors(prompts[0], later).max() <= 1e-4


async def test_a_hold_stops_a_version_that_is_already_on_its_way(pair):
    _, engine = pair
    prompt = engine.prompt(8, seed=6)
    for pause_s in np.linspace(0, 0.25, 6):
        await asyncio.to_thread(engine.publish, engine.newest + 1, wait=False)
        await asyncio.sleep(pause_s)
        _, answer = await engine.hold({"hold_s": 60})
        named = answer["policy_version"]
        reply = (await engine.generate([prompt], 40))[0]
        assert reply["meta_info"]["policy_versions"] == [[named, 40]]
        assert engine.get("/policy_version")["policy_version"] == named
        await engine.hold({"hold_s": 0})
        await asyncio.to_thread(
            wait_until, lambda: engine.get("/policy_version")["policy_version"] == engine.newest, timeout_s=60
        )


async def test_a_hold_ends_although_whoever_held_it_has_died(pair):
    _, engine = pair
    await engine.hold({"hold_s": 0.5})
    await asyncio.to_thread(engine.publish, engine.newest + 1)  # returns once it is in use


async def test_a_trainer_that_went_back_is_followed_and_noticed(pair):
    engine, _ = pair
    old, new = engine.newest - 1, engine.newest + 7
    await asyncio.to_thread(engine.publish, new, engine.versions[old])
    prompt = engine.prompt(12, seed=7)
    reply = (await engine.generate([prompt], 10))[0]
    assert reply["meta_info"]["policy_versions"] == [[new, 10]]
    assert engine.errors(prompt, reply).max() <= 1e-4
    told = f"version {new} has the weights that version {old} had"
    await asyncio.to_thread(wait_until, lambda: told in engine.process.output, timeout_s=60)
    assert (await engine.metrics())["headrace_inference_returns_to_older_weights_total"] == 1


async def test_swaps_under_load_lose_nothing_and_drift_nowhere(pair):
    """Twenty here; test_soak.py has two hundred."""
    _, engine = pair
    found = await soak(engine, 20)
    assert all(reply["status"] == 200 and len(reply["output_ids"]) == 40 for reply in found.replies)
    assert found.largest_error <= 1e-4
    assert found.errors[-5:].mean() <= 3 * found.errors[:5].mean() + 1e-7


async def test_sigterm_hands_over_exactly_what_was_sampled(pair):
    """Last: it uses one of the two up."""
    staying, leaving = pair
    newest = max(staying.newest, leaving.newest) + 1
    for engine in pair:
        await asyncio.to_thread(engine.publish, newest)
    prompts = [leaving.prompt(20 + seed, seed) for seed in range(16)]
    task = asyncio.create_task(leaving.generate(prompts, 300, temperature=0))
    await running(leaving, task, 16)
    leaving.process.terminate()
    replies = await task
    assert await asyncio.to_thread(leaving.process.wait, 60) == 0
    undisturbed = await staying.generate(prompts, 300, temperature=0)
    for prompt, reply, whole in zip(prompts, replies, undisturbed, strict=True):
        ids = reply["output_ids"]
        assert reply["status"] == 200 and 0 < len(ids) < 300
        assert reply["meta_info"]["finish_reason"] == {
            "type": "abort",
            "message": "handed over: the engine is draining",
        }
        assert leaving.errors(prompt, reply).max() <= 1e-4
        rest = (await staying.generate([[*prompt, *ids]], 300 - len(ids), temperature=0))[0]
        assert [*ids, *rest["output_ids"]] == whole["output_ids"]
