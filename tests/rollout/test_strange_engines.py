"""Engines that talk nonsense of themselves, or that do not answer at all, harm nobody but themselves."""

import asyncio
import contextlib
import json
import socket

import pytest
from aiohttp import web

from services.rollout.inference import Engines
from services.rollout.sglang import Sglang
from services.rollout.vllm import Vllm
from tests.rollout.rig import eventually

SANE = {"policy_version": 3, "running": 0, "waiting": 0, "kv_used_tokens": 0, "kv_capacity_tokens": 9}


@contextlib.asynccontextmanager
async def telling(pages):
    """A server that answers GET with these pages by path, and how often each was asked for."""
    asked = dict.fromkeys(pages, 0)

    async def answer(request):
        asked[request.path] += 1
        return web.Response(body=pages[request.path])

    app = web.Application()
    app.add_routes([web.get(path, answer) for path in pages])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


def routed(addresses, **options):
    return Engines(addresses, timeout_s=60, attempts=1, vocabulary_size=9, **options)


@pytest.mark.parametrize(
    "load",
    [
        [1],
        "soon",
        {**SANE, "running": None},
        {**SANE, "waiting": "3"},
        {**SANE, "policy_version": "new"},
        {**SANE, "running": -5, "waiting": 9},
        {**SANE, "kv_used_tokens": float("nan")},
        {**SANE, "kv_capacity_tokens": None},
        {**SANE, "retracted": 1.5},
        json.loads("[" * 500 + "]" * 500),
    ],
)
async def test_a_load_that_cannot_be_is_passed_over(load):
    pages = {"/ready": b"", "/get_load": json.dumps(load).encode()}
    async with telling(pages) as (url, asked), routed([url], dialect=Sglang()) as engines:
        await asyncio.wait_for(engines.wait_ready(), 60)
        engines.engines[0].suspected.set()
        await eventually(lambda: asked["/get_load"] >= 2, timeout_s=60)
        assert engines.ready
        assert engines.engines[0].policy_version == 0


async def test_vllms_metrics_that_cannot_be_are_passed_over():
    pages = {"/health": b"", "/weight_info": b'{"weight_version": "run/3"}'}
    pages["/metrics"] = b"vllm:num_requests_running NaN"
    async with telling(pages) as (url, asked), routed([url], dialect=Vllm("run")) as engines:
        await asyncio.wait_for(engines.wait_ready(), 60)
        engines.engines[0].suspected.set()
        await eventually(lambda: asked["/metrics"] >= 2, timeout_s=60)
        assert engines.ready


async def test_an_engine_that_takes_no_connection_costs_no_attempt():
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(2):  # Linux lets one more than the backlog wait; who comes later gets no answer at all
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        addresses = [f"127.0.0.1:{full.getsockname()[1]}"]
        async with routed(addresses, connect_s=0.2) as engines:
            with engines.context("e", temperature=1, stop_token_ids=[1], min_policy_version=0) as tokens:
                tokens.append([5])
                (silent,) = engines.engines
                sampling = asyncio.ensure_future(tokens.sample(2))

                def tried():
                    silent.ready = True  # as if it had just gone; looks at it find out, too
                    engines.router.dispatch()
                    return tokens.failure or sampling.done()

                await eventually(tried, timeout_s=60)
                assert tokens.failure == f"{silent.url} takes no requests"
                assert not sampling.done()
                sampling.cancel()
                await asyncio.wait([sampling])
