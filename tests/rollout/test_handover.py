"""What becomes of an action when its engine swaps weights, aborts, fails, falls silent or dies, one or many times.

The scripted engine's token is its version, so a token, its label and the engine that drew it can be told apart.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import random

import pytest
from prometheus_client import REGISTRY

from headrace.v1 import trajectory_pb2 as pb
from services.rollout.circuit import CircuitLimits
from services.rollout.inference import EngineError, Engines
from services.rollout.sglang import Sglang
from services.rollout.window import WindowLimits
from tests.engine_script import Script
from tests.processes import free_port
from tests.rollout.rig import eventually
from tests.scripted_engine import ScriptedEngine

FORBEARING = CircuitLimits(failures=1_000_000)


@contextlib.asynccontextmanager
async def cluster(*scripts, versions, timeout_s=60.0, attempts=1000, **options):
    """Scripted engines that are ready, and their client."""
    servers = [
        await ScriptedEngine.start(script, policy_version=version)
        for script, version in zip(scripts, versions, strict=True)
    ]
    try:
        async with Engines(
            [server.url for server in servers],
            timeout_s=timeout_s,
            attempts=attempts,
            vocabulary_size=10_000,
            **{"circuit": FORBEARING} | options,
        ) as engines:
            await eventually(lambda: all(engine.ready for engine in engines.engines), timeout_s=60)
            yield servers, engines
    finally:
        for server in servers:
            await server.stop()


def context(engines, name="e"):
    return engines.context(name, temperature=1.0, stop_token_ids=[1], min_policy_version=0)


def versions_of(sample):
    return [version for version, length in sample.version_spans for _ in range(length)]


async def test_each_token_has_its_version_across_swaps_and_hand_overs():
    slow = Script(delay_per_token_s=0.02)
    async with cluster(slow, slow, versions=(3, 30)) as (servers, engines):

        async def swap():
            for number in range(1, 40):
                await asyncio.sleep(0.03)
                await servers[number % 2].set_policy_version((3, 30)[number % 2] + 100 * number)
                for server in servers:
                    for body in list(server.requests)[-3:]:
                        if body["outcome"] == "running" and number % 3 == 0:
                            await Sglang().abort(
                                engines._http, engines.engines[servers.index(server)].root, body["rid"]
                            )

        async def episode(number):
            with context(engines, f"e{number}") as tokens:
                tokens.append([2])
                return [await tokens.sample(30) for _ in range(2)]

        swapping = asyncio.create_task(swap())
        samples = [sample for result in await asyncio.gather(*map(episode, range(8))) for sample in result]
        await swapping
    assert all(sample.token_ids == versions_of(sample) for sample in samples)
    assert all(len(sample.token_ids) == 30 for sample in samples)
    assert sum(len(sample.version_spans) for sample in samples) > 2 * len(samples)


async def test_two_engines_on_different_versions_are_told_apart():
    async with cluster(Script(), Script(), versions=(5, 6)) as (servers, engines):

        async def episode(number):
            with context(engines, f"e{number}") as tokens:
                tokens.append([2])
                samples = []
                for _ in range(3):
                    samples.append(await tokens.sample(2))
                return samples, tokens.engine.url

        for samples, url in await asyncio.gather(*map(episode, range(10))):
            version = 5 if url == servers[0].url else 6
            assert [sample.token_ids for sample in samples] == [[version] * 2] * 3
            assert [sample.version_spans for sample in samples] == [[(version, 2)]] * 3
    assert all(server.requests for server in servers)


async def test_a_killed_engine_costs_its_running_calls_alone():
    async with cluster(Script(), Script(), versions=(5, 6)) as (servers, engines):
        engines.engines[1].contexts = 1  # so that the first is tried first
        with context(engines) as tokens:
            tokens.append([2])
            assert (await tokens.sample(2)).token_ids == [5, 5]
            servers[0].set_script(Script(delay_per_token_s=60))
            sampling = asyncio.create_task(tokens.sample(2))
            await eventually(lambda: servers[0]._running, timeout_s=60)
            await servers[0].stop()
            sample = await sampling
    assert sample.token_ids == [6, 6] and sample.version_spans == [(6, 2)]
    assert servers[1].requests[0]["input_ids"] == [2, 5, 5]


async def test_a_drained_engine_hands_over_what_it_has():
    slow = Script(delay_per_token_s=0.1)
    async with cluster(slow, Script(), versions=(5, 6)) as (servers, engines):
        engines.engines[1].contexts = 1
        with context(engines) as tokens:
            tokens.append([2])
            sampling = asyncio.create_task(tokens.sample(50))
            await eventually(lambda: servers[0]._running, timeout_s=60)
            await asyncio.sleep(0.35)
            servers[0].set_script(Script(draining=True))
            await Sglang().abort(engines._http, engines.engines[0].root, servers[0].requests[0]["rid"])
            sample = await sampling
            assert tokens.engine is engines.engines[1]
    kept = sample.token_ids.count(5)
    assert 1 <= kept < 50 and sample.token_ids == [5] * kept + [6] * (50 - kept) == versions_of(sample)
    assert servers[1].requests[0]["input_ids"] == [2] + [5] * kept
    assert servers[1].requests[0]["sampling_params"]["max_new_tokens"] == 50 - kept


async def test_aborts_that_bring_tokens_use_up_no_attempts():
    async with cluster(Script(delay_per_token_s=0.05), versions=(5,), attempts=1) as ((server,), engines):

        async def disturb():
            while True:
                await asyncio.sleep(0.12)
                for body in list(server.requests)[-1:]:
                    await Sglang().abort(engines._http, engines.engines[0].root, body["rid"])

        disturbing = asyncio.create_task(disturb())
        with context(engines) as tokens:
            tokens.append([2])
            sample = await tokens.sample(12)
        disturbing.cancel()
    assert sample.token_ids == [5] * 12 and sample.finish_reason == pb.FINISH_REASON_LENGTH
    assert len(server.requests) > 2


async def test_aborts_without_any_token_use_up_the_attempts():
    async with cluster(Script(delay_s=60), versions=(5,), attempts=2) as ((server,), engines):
        with context(engines) as tokens:
            tokens.append([2])
            sampling = asyncio.create_task(tokens.sample(4))
            for count in (1, 2):
                await eventually(lambda count=count: len(server.requests) == count and server._running, timeout_s=60)
                await Sglang().abort(engines._http, engines.engines[0].root, server.requests[-1]["rid"])
            with pytest.raises(EngineError, match="2 calls failed, the last was aborted"):
                await sampling


@pytest.mark.parametrize("seed", range(8))
async def test_an_action_is_what_was_sampled_whatever_happened_on_the_way(seed):
    """Random aborts, statuses, cuts, nonsense and silences at two engines, which take turns in drawing known replies.

    Engines number what they draw, and note what they draw it for: an action must be made of such pieces, in order.
    """
    draw = random.Random(seed)
    faults = ["ok", "500", "503", "cut", "cut_body", "garbage", "wrong_spans", "short_logprobs", "hang"]
    weights = [10, 1, 1, 1, 1, 1, 1, 1, 0.1]
    numbers = itertools.count(1000, 1000)
    drawn = {}  # (context, first token) -> the version that drew it

    def numbering(version):
        def policy(prompt, sampling):
            first = next(numbers)
            drawn[tuple(prompt), first] = version
            return range(first, first + sampling["max_new_tokens"])

        return policy

    plan = [draw.choices(faults, weights, k=200) for _ in range(2)]
    servers = [
        await ScriptedEngine.start(
            Script(delay_per_token_s=0.005, faults=each), policy=numbering(version), policy_version=version
        )
        for each, version in zip(plan, (3, 4), strict=True)
    ]
    async with Engines(
        [server.url for server in servers],
        timeout_s=1.0,
        attempts=1000,
        vocabulary_size=1_000_000,
        circuit=CircuitLimits(failures=3, first_s=0.05, longest_s=0.2),
        window=WindowLimits(1, 3, 8),
    ) as engines:

        async def disturb():
            while True:
                await asyncio.sleep(draw.random() / 50)
                number = draw.randrange(2)
                if running := list(servers[number]._running):
                    await Sglang().abort(engines._http, engines.engines[number].root, draw.choice(running))

        async def episode(number):
            context_, versions = [2], []
            with context(engines, f"e{number}") as tokens:
                tokens.append(context_)
                for _ in range(3):
                    budget = draw.randint(1, 12)
                    sample = await tokens.sample(budget)
                    assert len(sample.token_ids) == len(sample.logprobs) == len(versions_of(sample)) == budget
                    assert sample.finish_reason == pb.FINISH_REASON_LENGTH
                    context_ += sample.token_ids
                    versions += versions_of(sample)
                    assert tokens.length == len(context_)
                return context_, versions

        disturbing = asyncio.create_task(disturb())
        handed_over = False
        async with asyncio.timeout(100):
            while not handed_over:  # aborts come by chance: until one has met an action
                contexts = await asyncio.gather(*map(episode, range(6)))
                handed_over = sum(pieces(drawn, *made) for made in contexts) > 3 * len(contexts)
        disturbing.cancel()
        assert engines.router.waiting == 0
        assert [engine.running for engine in engines.engines] == [0, 0]
    for server in servers:
        await server.stop()


def pieces(drawn, context_, versions):
    """How many draws the actions of a context are made of; asserts that they are, in order, each used once."""
    count, version = 0, None
    for index, token in enumerate(context_[1:], start=1):
        if (tuple(context_[:index]), token) in drawn:
            version = drawn.pop((tuple(context_[:index]), token))
            count += 1
        else:
            assert index > 1 and token == context_[index - 1] + 1
        assert versions[index - 1] == version
    return count


async def test_a_failing_engine_is_left_alone_and_comes_back():
    port = free_port()
    circuit = CircuitLimits(failures=3, first_s=0.2, longest_s=0.4)
    bad = await ScriptedEngine.start(Script(fault="500", fault_rate=1.0), policy_version=5, port=port)
    good = await ScriptedEngine.start(policy_version=6)
    async with Engines(
        [bad.url, good.url], timeout_s=60, attempts=1000, vocabulary_size=100, circuit=circuit
    ) as engines:
        await eventually(lambda: all(engine.ready for engine in engines.engines), timeout_s=60)

        async def episodes(count):
            async def run(number):
                with context(engines, f"e{number}") as tokens:
                    tokens.append([2])
                    return (await tokens.sample(1)).token_ids[0]

            return await asyncio.gather(*map(run, range(count)))

        started_s = asyncio.get_running_loop().time()
        for _ in range(20):
            assert set(await episodes(10)) == {6}
        passed_s = asyncio.get_running_loop().time() - started_s
        # The calls that opened it, those under way then, and one for each time that it was tried again.
        assert len(bad.requests) <= 10 + passed_s / 0.15 + 2
        bad.set_script(Script())
        async with asyncio.timeout(60):
            while 5 not in await episodes(10):
                pass
    await bad.stop()
    await good.stop()


async def test_calls_beyond_the_window_wait_here_and_not_at_the_engine():
    script = Script(delay_s=0.05)
    window = WindowLimits(1, 4, 4)
    most = 0
    async with cluster(script, versions=(5,), window=window) as ((server,), engines):

        async def watch():
            nonlocal most
            while True:
                most = max(most, len(server._running))
                await asyncio.sleep(0.002)

        async def run(number):
            with context(engines, f"e{number}") as tokens:
                tokens.append([2])
                return await tokens.sample(1)

        watching = asyncio.create_task(watch())
        samples = await asyncio.gather(*map(run, range(30)))
        watching.cancel()
    assert len(samples) == 30 and 1 <= most <= 4


async def test_the_window_follows_an_engines_pressure_and_its_metrics_tell():
    script = Script(delay_s=0.02)
    async with cluster(script, versions=(5,), window=WindowLimits(2, 8, 64)) as ((server,), engines):
        (engine,) = engines.engines

        async def episode(number):
            with context(engines, f"e{number}") as tokens:
                tokens.append([2])
                while True:
                    await tokens.sample(1)

        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            episodes = [tasks.create_task(episode(number)) for number in range(100)]
            await eventually(lambda: engine.window.size == 64, timeout_s=60)
            server.set_script(dataclasses.replace(script, kv_used_tokens=970_000))
            await eventually(lambda: engine.window.size == 2, timeout_s=60)
            await eventually(lambda: len(server._running) <= 2, timeout_s=60)
            assert REGISTRY.get_sample_value("headrace_rollout_engine_window", {"engine": server.url}) == 2
            assert REGISTRY.get_sample_value("headrace_rollout_engine_circuit", {"engine": server.url}) == 0
            assert REGISTRY.get_sample_value("headrace_rollout_waiting_engine_calls") >= 90
            server.set_script(script)
            await eventually(lambda: engine.window.size >= 10, timeout_s=60)
            for task in episodes:
                task.cancel()
    assert REGISTRY.get_sample_value("headrace_rollout_engine_window", {"engine": server.url}) is None
