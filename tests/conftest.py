"""Fixtures that several services' tests share."""

import pytest

from tests import processes


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory):
    """A real redis-server for the session; tests keep apart by run id or flush it."""
    with processes.redis_server(tmp_path_factory.mktemp("redis")) as (url, _):
        yield url
