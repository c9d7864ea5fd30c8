"""Which redis-server `headrace run` starts, and what it says when there is none."""

import sys
from pathlib import Path

import pytest

from headrace import redis_server
from headrace.errors import StartupError
from tests import processes


def program(folder: Path, answer: str) -> Path:
    path = folder / "redis-server"
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return path


def test_a_new_enough_system_server_comes_first(tmp_path):
    expected = program(tmp_path, "Redis server v=7.2.4 sha=00000000:0 malloc=jemalloc bits=64")
    assert redis_server.find(str(tmp_path)) == expected


@pytest.mark.parametrize("answer", ["Redis server v=6.0.16 sha=0", "not found"])
def test_an_old_or_broken_system_server_gives_way_to_the_wheel(tmp_path, answer):
    program(tmp_path, answer)
    found = redis_server.find(str(tmp_path))
    assert found.is_relative_to(Path(sys.prefix))
    assert redis_server.version(found) >= (6, 2)


def test_versions():
    assert redis_server.version(Path("/nonexistent")) == (0, 0)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:{port}/0", "redis://:secret@127.0.0.1:{port}/0", "nonsense"])
async def test_an_absent_server_is_named_with_the_remedy_and_no_password(url):
    url = url.format(port=processes.free_port())
    with pytest.raises(StartupError, match=r"redis\.url") as caught:
        await redis_server.wait_until_ready(url, timeout_s=0.3)
    assert url.replace(":secret@", "") in str(caught.value)


async def test_both_servers_start_from_our_command_line_and_keep_their_data(tmp_path):
    for name, found in (("system", redis_server.find()), ("wheel", redis_server.find("/nonexistent"))):
        folder = tmp_path / name
        folder.mkdir()
        port = processes.free_port()
        arguments = redis_server.arguments(found, port=port, directory=folder)
        with processes.running(arguments, tmp_path / f"{name}.log", ready=lambda port=port: processes.listening(port)):
            await redis_server.wait_until_ready(f"redis://127.0.0.1:{port}/0", timeout_s=5)
        assert list(folder.iterdir()), "no append-only file"
