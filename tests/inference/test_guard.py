"""The guard before an engine, over real HTTPS, and what a gateway's client makes of it."""

import asyncio
import contextlib
import logging

import pytest
import uvicorn

from headrace import security, tracing
from headrace.security import PLAIN, Security
from services.inference.guard import Guard
from services.rollout.inference import Engines
from tests.certificates import TOKEN, Authority, token_file
from tests.collector import Collector

LOAD = b'{"policy_version":3,"running":0,"waiting":0,"kv_used_tokens":0,"kv_capacity_tokens":1}'


async def answer(scope, receive, send):
    """An engine as far as readiness goes."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(LOAD))]})
    await send({"type": "http.response.body", "body": LOAD})


class Http(uvicorn.Server):
    def capture_signals(self):
        return contextlib.nullcontext()


@contextlib.asynccontextmanager
async def serving(secured):
    """host:port of a guarded engine."""
    files = dict(zip(("ssl_certfile", "ssl_keyfile"), secured.tls.files, strict=True)) if secured.tls else {}
    server = Http(
        uvicorn.Config(Guard(answer, secured), host="127.0.0.1", port=0, lifespan="off", log_config=None, **files)
    )
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(60):
        while not server.started:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    try:
        yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def engines(address, secured):
    return Engines([address], timeout_s=20, attempts=1, vocabulary_size=16, security=secured)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guard")
    return security.read(Authority(folder).issue("engine").tls(), token_file(folder))


async def test_a_gateway_with_the_token_finds_it_ready(ours):
    async with serving(ours) as address, engines(address, ours) as client, asyncio.timeout(60):
        await client.wait_ready()
        assert client.engines[0].url == f"https://{address}"
        assert client.engines[0].policy_version == 3


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("wrong token", "the token is wrong"),
        ("no token", "asks for a token"),
        ("wrong authority", "must be signed by security.tls.authority"),
        ("plaintext", "set security.tls here too"),
        ("TLS for plaintext", "speaks no TLS"),
    ],
)
async def test_a_gateway_that_may_not_call_says_why_in_one_line(ours, case, words, tmp_path, caplog):
    stranger = Authority(tmp_path, "stranger").issue("stranger").tls()
    callers = {
        "wrong token": Security(ours.tls, ("another-token-of-ours",)),
        "no token": Security(ours.tls),
        "wrong authority": security.Security(security.read(stranger, None).tls, ours.tokens),
        "plaintext": PLAIN,
        "TLS for plaintext": ours,
    }
    server = PLAIN if case == "TLS for plaintext" else ours
    with caplog.at_level(logging.ERROR, logger="services.rollout"):
        async with serving(server) as address, engines(address, callers[case]) as client, asyncio.timeout(60):
            while not caplog.records:  # noqa: ASYNC110 - a log has no event
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.2)
            assert not client.ready
    (record,) = caplog.records
    assert words in record.getMessage()
    assert address in record.getMessage()
    assert TOKEN not in record.getMessage()


async def test_a_call_is_a_span_of_its_callers(ours):
    with Collector() as collector:
        tracing.configure("engine", instance="engine-0", run_id="run", endpoint=collector.endpoint, sample_ratio=1.0)
        try:
            async with serving(ours) as address, engines(address, ours) as client:
                with tracing.trajectory("t"):
                    root = client.engines[0].root
                    await client._http.post(root / "generate", b"{}")
                await client._http.post(root / "generate", b"{}")  # of no trajectory
        finally:
            await asyncio.to_thread(tracing.stop)
    (episode,) = (span for span in collector.spans if span.name == "episode")
    (generate,) = (span for span in collector.spans if span.name == "generate")
    assert generate.parent_id == episode.ids.span_id
    assert episode.attributes["headrace.engine"] == f"https://{address}"
