"""The client of engines against real HTTP servers that answer from a script."""

import asyncio
import contextlib
import os

import pytest

from headrace.v1 import trajectory_pb2 as pb
from services.rollout.circuit import CircuitLimits
from services.rollout.dialect import Call, Reply
from services.rollout.inference import EngineError, Engines
from services.rollout.sample import BadReply, Sample, joined
from services.rollout.sglang import Sglang, read_reply
from tests.engine_script import Script
from tests.processes import free_port
from tests.rollout.rig import eventually
from tests.scripted_engine import ScriptedEngine


@contextlib.asynccontextmanager
async def client(*addresses, timeout_s=60.0, attempts=4, **options):
    async with Engines(addresses, timeout_s=timeout_s, attempts=attempts, vocabulary_size=100, **options) as engines:
        yield engines


@contextlib.asynccontextmanager
async def engine(script=None, **options):
    server = await ScriptedEngine.start(script, **options)
    try:
        yield server
    finally:
        await server.stop()


def context(engines, name="e", *, min_policy_version=0):
    return engines.context(name, temperature=0.7, stop_token_ids=[1], min_policy_version=min_policy_version)


async def test_what_is_sent_and_what_comes_back():
    async with engine(policy_version=3) as server, client(server.url) as engines:
        with context(engines, min_policy_version=2) as tokens:
            tokens.append([5, 6])
            sample = await tokens.sample(3)
            tokens.append([7])
            await tokens.sample(1)
            assert tokens.length == 7
    assert sample == Sample([3, 3, 3], [-1.0] * 3, [(3, 3)], pb.FINISH_REASON_LENGTH)
    first, second = server.requests
    assert first["input_ids"] == [5, 6] and second["input_ids"] == [5, 6, 3, 3, 3, 7]
    assert first["sampling_params"] == {"max_new_tokens": 3, "temperature": 0.7, "stop_token_ids": [1]}
    assert first["return_logprob"] is True and first["min_policy_version"] == 2
    assert "extra_key" not in first and second["extra_key"] == "3"
    assert first["rid"] != second["rid"]


async def test_versions_are_the_engines_word_across_a_swap():
    async with engine(Script(delay_per_token_s=0.1), policy_version=3) as server, client(server.url) as engines:
        with context(engines) as tokens:
            tokens.append([5])
            sampling = asyncio.create_task(tokens.sample(20))
            await eventually(lambda: server._running)
            await asyncio.sleep(0.25)
            await server.set_policy_version(7)
            sample = await sampling
    before = sample.token_ids.count(3)
    assert sample.token_ids == [3] * before + [7] * (20 - before)
    assert sample.version_spans == [(3, before), (7, 20 - before)]


@pytest.mark.parametrize(
    "fault", ["500", "cut", "cut_body", "garbage", "wrong_shape", "short_logprobs", "nan_logprobs", "wrong_spans"]
)
async def test_what_another_try_mends(fault):
    async with engine(Script(faults=[fault])) as server, client(server.url) as engines:
        with context(engines) as tokens:
            tokens.append([5])
            assert (await tokens.sample(2)).token_ids == [0, 0]
    assert len(server.requests) == 2
    assert server.requests[0]["input_ids"] == server.requests[1]["input_ids"]


async def test_attempts_are_counted():
    async with engine(Script(fault="500", fault_rate=1.0)) as server, client(server.url) as engines:
        with context(engines) as tokens:
            tokens.append([5])
            with pytest.raises(EngineError, match=r"4 calls failed.*500 by the script"):
                await tokens.sample(2)
    assert len(server.requests) == 4


async def test_a_wrong_request_is_not_repeated():
    async with engine(Script(faults=["400"])) as server, client(server.url) as engines:
        with context(engines) as tokens:
            tokens.append([5])
            with pytest.raises(EngineError, match="refused the request with 400: 400 by the script"):
                await tokens.sample(2)
    assert len(server.requests) == 1


async def test_a_silent_engine_is_left_after_the_deadline_and_told_to_abort():
    async with (
        engine(Script(delay_s=600)) as silent,
        engine(policy_version=2) as other,
        client(silent.url, other.url, timeout_s=1.5) as engines,
    ):
        with context(engines) as tokens:
            tokens.append([5])
            await eventually(lambda: all(engine.ready for engine in engines.engines))
            engines.engines[1].contexts = 1  # so that the silent one is tried first
            assert (await tokens.sample(2)).token_ids == [2, 2]
        assert silent.requests
        await eventually(lambda: not silent._running)


async def test_a_cancelled_call_is_aborted_at_the_engine():
    async with engine(Script(delay_s=30)) as server, client(server.url) as engines:
        with context(engines) as tokens:
            tokens.append([5])
            sampling = asyncio.create_task(tokens.sample(2))
            await eventually(lambda: server._running)
            sampling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sampling
            await eventually(lambda: not server._running)


async def test_engines_may_come_later():
    port = free_port()
    async with client(f"127.0.0.1:{port}", attempts=1) as engines:
        with context(engines) as tokens:
            tokens.append([5])
            sampling = asyncio.create_task(tokens.sample(2))
            await asyncio.sleep(0.3)
            assert tokens.trouble == "no engine is ready"
            async with engine(policy_version=None, port=port) as server:
                await asyncio.sleep(0.3)
                assert not sampling.done()
                await server.set_policy_version(4)
                assert (await asyncio.wait_for(sampling, 60)).token_ids == [4, 4]


async def test_an_unavailable_engine_costs_no_attempt():
    async with engine(Script(faults=["503"] * 3)) as server, client(server.url, attempts=1) as engines:
        with context(engines) as tokens:
            tokens.append([5])
            assert (await asyncio.wait_for(tokens.sample(2), 60)).token_ids == [0, 0]
    assert len(server.requests) == 4


async def test_contexts_stay_with_their_engine_and_spread():
    async with engine() as one, engine() as two, client(one.url, two.url) as engines:
        await eventually(lambda: all(engine.ready for engine in engines.engines))

        async def episode(number):
            with context(engines, f"e{number}") as tokens:
                for turn in range(3):
                    tokens.append([turn])
                    await tokens.sample(1)

        await asyncio.gather(*(episode(number) for number in range(10)))
        assert [engine.contexts for engine in engines.engines] == [0, 0]
    owners = [{request["rid"].split("-")[0] for request in server.requests} for server in (one, two)]
    assert len(owners[0]) == len(owners[1]) == 5 and not owners[0] & owners[1]


async def test_a_dead_engines_episode_goes_on_at_another():
    async with engine(policy_version=6) as survivor:
        first = await ScriptedEngine.start(policy_version=5)
        async with client(first.url, survivor.url) as engines:
            with context(engines) as tokens:
                tokens.append([5])
                await eventually(lambda: all(engine.ready for engine in engines.engines))
                engines.engines[1].contexts = 1
                assert (await tokens.sample(2)).token_ids == [5, 5]
                await first.stop()
                tokens.append([9])
                assert (await tokens.sample(1)).token_ids == [6]
    assert survivor.requests[0]["input_ids"] == [5, 5, 5, 9]
    assert survivor.requests[0]["extra_key"] == "5"


async def test_an_aborted_action_goes_on_from_its_tokens():
    async with engine(Script(delay_per_token_s=0.2), policy_version=3) as server, client(server.url) as engines:
        with context(engines) as tokens:
            tokens.append([5])
            sampling = asyncio.create_task(tokens.sample(20))
            await eventually(lambda: server._running)
            await asyncio.sleep(0.5)
            server.set_script(Script())
            await server.set_policy_version(4)
            await Sglang().abort(engines._http, engines.engines[0].root, "e-0")
            sample = await sampling
    kept = sample.token_ids.count(3)
    left = 20 - kept
    spans = [(3, kept), (4, left)]
    assert sample == Sample([3] * kept + [4] * left, [-1.0] * 20, spans, pb.FINISH_REASON_LENGTH)
    assert [request["input_ids"] for request in server.requests] == [[5], [5] + [3] * kept]
    assert server.requests[1]["sampling_params"]["max_new_tokens"] == left


async def test_failing_calls_leak_no_files():
    never = CircuitLimits(failures=1_000_000)
    script = Script(fault="500", fault_rate=1.0)
    async with engine(script) as server, client(server.url, attempts=1, circuit=never) as engines:

        async def calls(count):
            for number in range(count):
                with context(engines, f"e{number}") as tokens:
                    tokens.append([5])
                    with pytest.raises(EngineError):
                        await tokens.sample(2)

        await asyncio.gather(*(calls(5) for _ in range(32)))
        before = len(os.listdir("/proc/self/fd"))
        await asyncio.gather(*(calls(310) for _ in range(32)))
        assert len(os.listdir("/proc/self/fd")) <= before + 8  # the pool breathes
    assert len(server.requests) == 32 * 315


class _Deaf(Sglang):
    async def abort(self, http, root, rid):
        await http.post(root / "nowhere", b"{}")


async def test_a_failing_abort_harms_nobody():
    async with engine(Script(delay_s=30)) as server, client(server.url, timeout_s=0.2, attempts=2) as engines:
        with context(engines) as tokens:
            tokens.append([5])
            engines._dialect = _Deaf()
            with pytest.raises(EngineError, match=r"2 calls failed.*no reply within 0.2 s"):
                await tokens.sample(2)


REPLY = (
    b'{"output_ids": [4, 1], "meta_info": {"completion_tokens": 2, "finish_reason": {"type": "stop"},'
    b' "output_token_logprobs": [[-0.5, 4, null], [0, 1, null]], "policy_versions": [[3, 1], [4, 1]],'
    b' "extra_key": "3"}}'
)


def read(data, **changes):
    limits = {"max_new_tokens": 2, "min_policy_version": 3, "vocabulary_size": 10, "stop_token_ids": ()}
    return read_reply(data, Call(rid="r", tokens="5", temperature=1.0, space="", **limits | changes))


def test_a_consistent_reply_is_read():
    assert read(REPLY) == Reply(Sample([4, 1], [-0.5, 0], [(3, 1), (4, 1)], pb.FINISH_REASON_STOP), "3")


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (b'ids": [4, 1]', b'ids": [4]', "different tokens"),
        (b'ids": [4, 1]', b'ids": [4, 2]', "different tokens"),
        (b'ids": [4, 1]', b'ids": null', "of type NoneType"),
        (b'tokens": 2', b'tokens": 3', "completion_tokens is 3"),
        (b"[3, 1], [4, 1]", b"[3, 1]", "covers 1 of 2"),
        (b"[3, 1], [4, 1]", b"[3, 3], [4, -1]", "policy_versions is"),
        (b"[3, 1], [4, 1]", b"[2, 1], [4, 1]", "older than 3"),
        (b"[3, 1], [4, 1]", b"[3.0, 1], [4, 1]", "policy_versions is"),
        (b"-0.5", b"NaN", "no log-probability"),
        (b"-0.5", b"0.5", "no log-probability"),
        (b"-0.5", b"null", "no log-probability"),
        (b"-0.5", b"-Infinity", "no log-probability"),
        (b"-0.5", b"-1" + b"0" * 400, "no log-probability"),
        (b"-0.5", b"1" + b"0" * 400, "no log-probability"),
        (b"[3, 1], [4, 1]", b"[3, 1], [9223372036854775808, 1]", "policy_versions is"),
        (b'"stop"', b'"else"', "KeyError"),
        (b'"meta_info"', b'"meta"', "KeyError"),
        (b'"extra_key": "3"', b'"extra_key": 3', "extra_key"),
        (REPLY, b"<html>", "JSONDecodeError"),
        (REPLY, b"[]", "TypeError"),
        (REPLY, b"[" * 100_000, "RecursionError"),
    ],
)
def test_a_reply_that_contradicts_itself_is_refused(old, new, word):
    assert old in REPLY
    with pytest.raises(BadReply, match=word):
        read(REPLY.replace(old, new))


def test_a_reply_that_contradicts_the_request_is_refused():
    with pytest.raises(BadReply, match="1 to 1 were asked for"):
        read(REPLY, max_new_tokens=1)
    with pytest.raises(BadReply, match=r"no token of 0\.\.3"):
        read(REPLY, vocabulary_size=4)


def test_an_abort_that_came_with_a_stop_token_leaves_nothing_to_sample():
    aborted = REPLY.replace(b'"stop"', b'"abort"')
    assert read(aborted).sample.finish_reason == pb.FINISH_REASON_ABORT
    assert read(aborted, stop_token_ids=(1,)).sample.finish_reason == pb.FINISH_REASON_STOP


def test_pieces_of_an_action_are_joined():
    parts = [
        Sample([1], [-1.0], [(3, 1)], pb.FINISH_REASON_ABORT),
        Sample([2], [-2.0], [(3, 1)], pb.FINISH_REASON_STOP),
    ]
    assert joined(parts, pb.FINISH_REASON_STOP) == Sample([1, 2], [-1.0, -2.0], [(3, 2)], pb.FINISH_REASON_STOP)
