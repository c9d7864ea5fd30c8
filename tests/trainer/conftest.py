"""A run's streams on a real Redis."""

import pytest

from headrace import stream
from tests.trainer.gateway import RUN_ID


@pytest.fixture
async def streams(redis_url):
    client = stream.connect(redis_url, timeout_s=5)
    await client.flushdb()
    streams = stream.Streams(client, RUN_ID, claim_timeout_s=30)
    await streams.open()
    yield streams
    await client.aclose()
