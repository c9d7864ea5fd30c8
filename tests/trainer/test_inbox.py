"""services.trainer.inbox against a Redis that forgets, or brings back what was forgotten."""

import asyncio

import pytest

from headrace import stream
from services.trainer.inbox import Inbox
from tests.trainer.gateway import RUN_ID

GROUPS = f"headrace:{{{RUN_ID}}}:groups"


@pytest.fixture
async def client(redis_url):
    client = stream.connect(redis_url, timeout_s=5)
    yield client
    await client.aclose()


async def add(client, payload, entry_id="*"):
    return (await client.xadd(GROUPS, {"record": payload}, id=entry_id)).decode()


async def test_it_outlasts_a_redis_that_loses_its_memory(streams, client):
    inbox = Inbox(streams)
    await add(client, b"before")
    assert [entry.payload for entry in await inbox.read(9, 0)] == [b"before"]
    await client.flushdb()
    assert await inbox.read(9, 0.2) == []
    await add(client, b"after")
    assert [entry.payload for entry in await inbox.read(9, 0.2)] == [b"after"]
    waiting = asyncio.create_task(inbox.read(9, 5))
    await asyncio.sleep(0.2)
    await client.flushdb()
    assert await asyncio.wait_for(waiting, 3) == []


async def test_what_was_acknowledged_and_comes_back_is_not_handed_out_again(streams, client):
    inbox = Inbox(streams)
    old, held = await add(client, b"old"), await add(client, b"held")
    assert [entry.entry_id for entry in await inbox.read(9, 0)] == [old, held]
    await inbox.acknowledge([old])
    await client.flushdb()  # and Redis comes back as it was a second ago
    await add(client, b"old", old)
    await add(client, b"held", held)
    await streams.open()
    new = await add(client, b"new")
    assert [entry.entry_id for entry in await inbox.read(9, 0)] == [new]
    assert await streams.group_ids() == [held, new]
