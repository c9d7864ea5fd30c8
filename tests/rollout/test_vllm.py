"""The gateway's dialect of vLLM against a scripted server that follows vLLM's documented schema."""

import asyncio
import contextlib

import aiohttp
import pytest
from yarl import URL

from headrace.v1 import trajectory_pb2 as pb
from services.rollout import metrics
from services.rollout.dialect import Call, Http
from services.rollout.inference import EngineError, Engines
from services.rollout.sample import BadReply, Sample
from services.rollout.vllm import Vllm, read_reply
from tests.processes import free_port
from tests.rollout import rig
from tests.rollout.episodes import Episodes, ids
from tests.rollout.rig import eventually
from tests.rollout.scripted_environment import ScriptedEnvironment, turns
from tests.scripted_vllm import Script, ScriptedVllm


@contextlib.asynccontextmanager
async def vllm(script=None, **options):
    server = await ScriptedVllm.start(script, **options)
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def client(*addresses, attempts=4):
    async with Engines(addresses, timeout_s=60, attempts=attempts, vocabulary_size=100, dialect=Vllm("run")) as engines:
        yield engines


@contextlib.contextmanager
def context(engines, *, min_policy_version=0):
    with engines.context("e", temperature=0.7, stop_token_ids=[1], min_policy_version=min_policy_version) as tokens:
        tokens.append([5, 6])
        yield tokens


async def control(server, path):
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/{path}") as response:
        assert response.status == 200


async def test_what_is_sent_and_what_comes_back():
    async with vllm(weight_version="run/3") as server, client(server.url) as engines:
        with context(engines) as tokens:
            sample = await tokens.sample(3)
            tokens.append([7])
            await tokens.sample(1)
    assert sample == Sample([3, 3, 3], [-1.0] * 3, [(3, 3)], pb.FINISH_REASON_LENGTH)
    first, second = server.requests
    assert first["prompt"] == [5, 6] and second["prompt"] == [5, 6, 3, 3, 3, 7]
    assert first["request_id"] != second["request_id"]
    assert first["cache_salt"] == second["cache_salt"] == "3"
    assert (first["max_tokens"], first["temperature"], first["stop_token_ids"]) == (3, 0.7, [1])
    assert (first["top_p"], first["top_k"], first["min_p"], first["repetition_penalty"]) == (1, 0, 0, 1)
    assert first["return_token_ids"] and first["return_tokens_as_token_ids"] and first["logprobs"] == 1


async def test_a_stop_token_is_part_of_the_action():
    async with vllm(Script(end_with_stop=True), weight_version="run/3") as server, client(server.url) as engines:
        with context(engines) as tokens:
            sample = await tokens.sample(3)
    assert sample == Sample([3, 3, 1], [-1.0] * 3, [(3, 3)], pb.FINISH_REASON_STOP)


async def test_an_update_during_a_call_gives_all_its_tokens_the_older_version():
    undated = metrics.undated_tokens._value.get()
    async with vllm(Script(delay_per_token_s=0.1), weight_version="run/3") as server, client(server.url) as engines:
        with context(engines) as tokens:
            sampling = asyncio.create_task(tokens.sample(20))
            await eventually(lambda: server.running, timeout_s=60)
            await asyncio.sleep(0.25)
            server.hold("run/4")
            sample = await sampling
    assert set(sample.token_ids) == {3, 4}
    assert sample.version_spans == [(3, 20)]
    assert metrics.undated_tokens._value.get() == undated + 20


async def test_a_pause_that_aborts_hands_over_partial_tokens_of_one_version_each():
    async with vllm(Script(delay_per_token_s=0.1), weight_version="run/3") as server, client(server.url) as engines:
        with context(engines) as tokens:
            sampling = asyncio.create_task(tokens.sample(20))
            await eventually(lambda: server.running, timeout_s=60)
            await asyncio.sleep(0.25)
            await control(server, "pause?mode=abort")
            await eventually(lambda: not server.running, timeout_s=60)
            server.hold("run/4")
            await control(server, "resume")
            sample = await sampling
    versions = [version for version, length in sample.version_spans for _ in range(length)]
    assert len(sample.token_ids) == 20 and sample.token_ids[-1] == 4
    # A call that began in the pause reads the older version and runs under the newer: never younger than the truth.
    assert all(version <= token for version, token in zip(versions, sample.token_ids, strict=True))
    assert sum(request["max_tokens"] for request in server.requests[1:]) <= 20


async def test_a_call_waits_for_the_version_that_it_demands():
    async with vllm(weight_version="run/3") as server, client(server.url) as engines:
        with context(engines, min_policy_version=4) as tokens:
            sampling = asyncio.create_task(tokens.sample(1))
            await eventually(lambda: engines.ready, timeout_s=60)
            await asyncio.sleep(0.2)
            assert not server.requests
            server.hold("run/4")
            assert (await sampling).version_spans == [(4, 1)]


@pytest.mark.parametrize("name", ["default", "other/3", "run/x"])
async def test_a_server_without_this_runs_weights_is_not_ready(name):
    async with vllm() as server, client(server.url) as engines:
        server.weight_version = name
        with context(engines) as tokens:
            sampling = asyncio.create_task(tokens.sample(1))
            await asyncio.sleep(0.3)
            assert not engines.ready and tokens.trouble == "no engine is ready"
            server.hold("run/2")
            assert (await sampling).token_ids == [2]


async def test_without_dev_mode_it_is_not_ready():
    async with vllm(Script(dev_mode=False), weight_version="run/2") as server, client(server.url) as engines:
        await asyncio.sleep(0.3)
        assert not engines.ready


@pytest.mark.parametrize("fault", ["500", "503", "cut", "garbage"])
async def test_what_another_try_mends(fault):
    async with vllm(Script(faults=[fault]), weight_version="run/2") as server, client(server.url) as engines:
        with context(engines) as tokens:
            assert (await tokens.sample(2)).token_ids == [2, 2]
    assert len(server.requests) == 2


async def test_a_wrong_request_is_not_repeated():
    async with vllm(Script(faults=["400"]), weight_version="run/2") as server, client(server.url) as engines:
        with (
            context(engines) as tokens,
            pytest.raises(EngineError, match="refused the request with 400: 400 by the script"),
        ):
            await tokens.sample(2)
    assert len(server.requests) == 1


async def test_what_it_says_of_its_load():
    async with vllm(weight_version="run/2") as server, Http() as http:
        load = await Vllm("run").look(http, URL(server.url))
    assert load is not None
    assert (load.policy_version, load.running, load.waiting, load.kv_used, load.retracted) == (2, 0, 0, 0.25, 3)


async def test_a_dead_servers_call_goes_on_at_another():
    port = free_port()
    first = await ScriptedVllm.start(Script(delay_per_token_s=60), weight_version="run/5", port=port)
    async with vllm(weight_version="run/6") as second, client(first.url, second.url) as engines:
        await eventually(lambda: all(engine.ready for engine in engines.engines), timeout_s=60)
        engines.engines[1].contexts = 1  # so that the first is tried first
        with context(engines) as tokens:
            sampling = asyncio.create_task(tokens.sample(2))
            await eventually(lambda: first.running, timeout_s=60)
            await first.stop()
            assert (await sampling).version_spans == [(6, 2)]


async def test_a_whole_episode(tmp_path):
    environment = await ScriptedEnvironment.start(turns(3))
    async with (
        vllm(weight_version="run/7") as server,
        rig.world(
            tmp_path,
            engines=[server.url],
            environment=environment.address,
            inference__dialect="vllm",
        ) as world,
    ):
        trajectory = await Episodes(server, environment, world).run()
    await environment.stop()
    assert trajectory.status == pb.EPISODE_STATUS_COMPLETED
    assert len(trajectory.turns) == len(server.requests) == 3
    for turn in trajectory.turns:
        assert [span.policy_version for span in turn.version_spans] == [7]
        assert set(ids(turn.action_token_ids)) == {7}


REPLY = (
    b'{"choices": [{"token_ids": [4, 1], "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.5, 0],'
    b' "tokens": ["token_id:4", "token_id:1"]}}], "usage": {"prompt_tokens": 2}}'
)


def read(data, **changes):
    limits = {"max_new_tokens": 2, "min_policy_version": 3, "vocabulary_size": 10, "stop_token_ids": (1,)}
    return read_reply(data, Call(rid="r", tokens="5,6", temperature=1.0, space="", **limits | changes), 3, "3")


def test_a_consistent_reply_is_read():
    assert read(REPLY).sample == Sample([4, 1], [-0.5, 0], [(3, 2)], pb.FINISH_REASON_STOP)


def test_an_abort_before_the_first_token_is_read():
    aborted = (
        b'{"choices": [{"token_ids": [], "finish_reason": "abort", "logprobs": null}], "usage": {"prompt_tokens": 2}}'
    )
    assert read(aborted).sample == Sample([], [], [], pb.FINISH_REASON_ABORT)


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (b"[4, 1]", b"[4]", "different tokens"),
        (b"token_id:4", b" hello", "different tokens"),
        (b'prompt_tokens": 2', b'prompt_tokens": 3', "counts 3 prompt tokens, 2 were sent"),
        (b"[-0.5, 0]", b"[-0.5]", "1 logprobs for 2 tokens"),
        (b"[-0.5, 0]", b"[-0.5, null]", "no log-probability"),
        (b'"stop"', b'"error"', "KeyError"),
        (b'"choices": [', b'"choices": [{}, ', "ValueError"),
        (REPLY, b"<html>", "JSONDecodeError"),
    ],
)
def test_a_reply_that_contradicts_itself_is_refused(old, new, word):
    assert old in REPLY
    with pytest.raises(BadReply, match=word):
        read(REPLY.replace(old, new))
