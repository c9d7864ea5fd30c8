"""Names of engines: looked up, and followed while hosts come and go."""

import asyncio

import pytest

from services.rollout import lookup
from services.rollout.inference import Engines
from tests.rollout.rig import eventually
from tests.scripted_engine import ScriptedEngine


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("engine:30000", True),
        ("run-inference.rl.svc:30000", True),
        ("127.0.0.1:30000", False),
        ("[::1]:30000", False),
        ("http://engine:30000", False),
    ],
)
def test_only_names_are_looked_up(address, expected):
    assert lookup.is_name(address) is expected


async def test_a_name_resolves_to_hosts_of_one_family():
    assert await lookup.resolve("localhost:30000") in ({"127.0.0.1:30000"}, {"[::1]:30000"})


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64])
async def test_a_name_that_is_not_known_resolves_to_nothing(host):
    assert await lookup.resolve(f"{host}:30000") == frozenset()


class Names:
    """A name server with one name."""

    def __init__(self):
        self.hosts = frozenset()

    async def __call__(self, name):
        assert name == "engines:1"
        return self.hosts


async def test_each_host_of_a_name_is_an_engine():
    names = Names()
    one, two = await ScriptedEngine.start(), await ScriptedEngine.start()
    hosts = [server.url.removeprefix("http://") for server in (one, two)]
    options = {"timeout_s": 5, "attempts": 4, "vocabulary_size": 100, "lookup_period_s": 0.05}
    async with Engines(["engines:1"], resolve=names, **options) as engines:
        assert not engines.ready
        waiting = asyncio.create_task(engines.wait_ready())
        names.hosts = frozenset(hosts[:1])
        await asyncio.wait_for(waiting, 60)
        names.hosts = frozenset(hosts)
        await eventually(lambda: [engine.ready for engine in engines.engines] == [True, True])
        with engines.context("e", temperature=1, stop_token_ids=[1], min_policy_version=0) as context:
            context.append([5])
            await context.sample(1)
            assert context.engine is not None
            names.hosts = frozenset(hosts) - {context.engine.url.removeprefix("http://")}
            await eventually(lambda: len(engines.engines) == 1)
            await context.sample(1)
            assert [len(server.requests) for server in (one, two)] == [1, 1]
        names.hosts = frozenset()
        await asyncio.sleep(0.2)
        assert [engine.ready for engine in engines.engines] == [True]
    await one.stop()
    await two.stop()
