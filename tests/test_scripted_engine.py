"""The scripted engine keeps the contract that it stands for."""

from __future__ import annotations

import asyncio
import json

import aiohttp

from tests.engine_script import Script
from tests.scripted_engine import ScriptedEngine


async def _generate(session: aiohttp.ClientSession, engine: ScriptedEngine, **body: object) -> dict:
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}, **body}
    async with session.post(engine.url + "/generate", json=body) as response:
        return {"status": response.status, **json.loads(await response.text())}


async def test_tokens_name_their_version_across_a_swap():
    engine = await ScriptedEngine.start(Script(delay_per_token_s=0.1), policy_version=3)
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(_generate(session, engine, rid="a"))
        await asyncio.sleep(0.25)
        await engine.set_policy_version(7)
        reply = await request
    await engine.stop()
    meta = reply["meta_info"]
    assert reply["output_ids"] == [3, 3, 7, 7]
    assert meta["policy_versions"] == [[3, 2], [7, 2]]
    assert [entry[:2] for entry in meta["output_token_logprobs"]] == [[-1.0, 3], [-1.0, 3], [-1.0, 7], [-1.0, 7]]
    assert meta["extra_key"] == "3" and meta["completion_tokens"] == 4 and meta["prompt_tokens"] == 2


async def test_minimum_version_is_waited_for_and_absence_of_weights_is_503():
    engine = await ScriptedEngine.start(policy_version=None)
    async with aiohttp.ClientSession() as session:
        assert (await _generate(session, engine))["status"] == 503
        request = asyncio.create_task(_generate(session, engine, min_policy_version=2))
        await asyncio.sleep(0.05)
        await engine.set_policy_version(1)
        await asyncio.sleep(0.05)
        assert not request.done()
        await engine.set_policy_version(2)
        assert (await request)["output_ids"] == [2, 2, 2, 2]
    await engine.stop()


async def test_abort_returns_what_was_sampled():
    engine = await ScriptedEngine.start(Script(delay_per_token_s=0.2, length=4), policy_version=1)
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(_generate(session, engine, rid="long"))
        await asyncio.sleep(0.5)
        await session.post(engine.url + "/abort_request", json={"rid": "long"})
        reply = await request
    await engine.stop()
    assert reply["output_ids"] == [1, 1] and reply["meta_info"]["finish_reason"]["type"] == "abort"


async def test_faults_come_in_order_then_stop():
    engine = await ScriptedEngine.start(Script(faults=["500", "503", "cut", "garbage", "cut_body"]))
    outcomes: list[object] = []
    async with aiohttp.ClientSession() as session:
        for _ in range(6):
            try:
                outcomes.append((await _generate(session, engine))["status"])
            except aiohttp.ClientError as error:
                outcomes.append(type(error).__name__)
            except ValueError:
                outcomes.append("no JSON")
    await engine.stop()
    assert outcomes == [500, 503, "ServerDisconnectedError", "no JSON", "ClientPayloadError", 200]


async def test_two_thousand_sleepers_at_once():
    engine = await ScriptedEngine.start(Script(delay_s=0.5), policy_version=5)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        replies = await asyncio.gather(*(_generate(session, engine, rid=str(i)) for i in range(2000)))
        elapsed_s = loop.time() - start_s
    await engine.stop()
    assert all(reply["output_ids"] == [5] * 4 for reply in replies)
    assert elapsed_s < 20
