"""Every environment of the catalog keeps the rules of `headrace env check`, in a server of ours."""

import contextlib

import pytest
from aiohttp import web
from websockets.asyncio.server import serve

from headrace.environment_kit import check
from headrace.environment_kit.check import Result
from headrace.environment_kit.rules import Settings
from headrace.errors import StartupError
from services.envs import catalog
from services.envs.server import EnvironmentServer
from tests.envs.conversation import listening
from tests.envs.sandbox.strengths import namespaces_allowed
from tests.envs.test_mcp_tools import http_server
from tests.envs.test_openenv_proxy import NUMBERS, Guessing
from tests.envs.web_service import web_service

TASKS = [{"prompt": "What is 2 + 3?", "expected": "5"}]
OPTIONS = {
    "calculator": {},
    "guess_number": {},
    "gymnasium": {"arguments": {"max_episode_steps": 6}},
    "http_tool": {"tasks": TASKS, "turns": 6},
    "judge": {"tasks": TASKS, "turns": 6},
    "mcp": {"tasks": TASKS, "turns": 6, "only": ["add", "divide"]},
    "openenv": NUMBERS,
    "python_tool": {"sandbox": {"strength": "monty"}},
    "reasoning_gym": {},
    "short_answer": {},
    "swe_lite": {"turns": 4, "sandbox": {"strength": "process", "max_open": 4}},
    "tau2": {"domain": "mock", "turns": 6},
    "textarena": {},
}


def test_none_is_left_out():
    assert OPTIONS.keys() == catalog.CATALOG.keys()


@contextlib.asynccontextmanager
async def outside(name: str, folder):
    """What an environment needs beside its server; the options that name it."""
    if name == "mcp":
        with http_server(folder) as (_, url):
            yield {"url": url}
    elif name == "openenv":
        async with serve(Guessing(), "127.0.0.1", 0) as server:
            yield {"url": f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/ws"}
    elif name == "http_tool":
        async with web_service(lambda number, asked: web.Response(text="5")) as service:
            yield {"tools": [{"name": "add", "description": "Adds.", "url": service.url}]}
    else:
        yield {}


# Its package takes seconds to import, in the server and in each worker.
EACH = [pytest.param(name, marks=pytest.mark.slow if name == "reasoning_gym" else ()) for name in sorted(OPTIONS)]


@pytest.mark.parametrize("name", EACH)
async def test_it_keeps_every_rule(name, tmp_path):
    try:
        catalog.find_class(name)
    except StartupError as error:
        pytest.skip(str(error))
    if name == "swe_lite" and not namespaces_allowed():
        pytest.skip("no user namespaces")
    settings = Settings(capacity=4, parallel=8, actions=("3", "4", "5"))
    async with outside(name, tmp_path) as places:
        maker = catalog.find(name, {**OPTIONS[name], **places})
        async with listening(EnvironmentServer({name: maker}, capacity=4)) as address:
            found = [finding async for finding in check.check(address, settings)]
    assert {
        finding.rule: (finding.reason, finding.reproduction) for finding in found if finding.result == Result.BROKEN
    } == {}
    kept = {finding.rule for finding in found if finding.result == Result.KEPT}
    assert kept >= set(check.NAMES) - {"demonstration", "long_step"}
