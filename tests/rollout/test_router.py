"""Which engine a call goes to, and when: engines are given, nothing is sent."""

import asyncio
import random
from collections import Counter

import pytest

from services.rollout.circuit import Circuit, CircuitLimits
from services.rollout.engine import Engine
from services.rollout.router import Route, Router, choose
from services.rollout.window import Load, WindowLimits


def engine(number, *, window=1000, version=0):
    result = Engine(f"http://10.0.0.{number}:30000", WindowLimits(1, window, window), policy_version=version)
    result.ready = True
    return result


def pick(engines, key="k", *, version=0, avoided=None, affinity=0):
    return choose(engines, Route(key, version), avoided=avoided, affinity=affinity, now_s=0.0)


def test_the_least_loaded_is_chosen_and_others_calls_count():
    engines = [engine(1), engine(2), engine(3)]
    engines[0].contexts, engines[1].elsewhere = 2, 1
    assert pick(engines) is engines[2]
    engines[2].contexts = 3
    assert pick(engines) is engines[1]


def test_gateways_choose_alike_among_equals_whatever_order_they_know_them_in():
    keys = [f"{number:08d}" for number in range(300)]
    chosen = [pick([engine(1), engine(2), engine(3)], key).url for key in keys]
    assert chosen == [pick([engine(3), engine(1), engine(2)], key).url for key in keys]
    assert all(60 <= count <= 140 for count in Counter(chosen).values())
    # One engine less moves the keys of that engine and no other.
    left = [pick([engine(1), engine(3)], key).url for key in keys]
    assert all(new == old for new, old in zip(left, chosen, strict=True) if old != engine(2).url)


def test_a_group_gathers_at_one_engine_and_groups_spread():
    engines = [engine(1), engine(2), engine(3)]
    router = Router(engines, affinity=8)
    for group in range(30):
        owners = set()
        for _ in range(8):
            chosen = pick(engines, f"{group:08d}", affinity=8)
            router.attach(Route("x"), chosen)
            owners.add(chosen)
        assert len(owners) <= 2
        assert max(engine.contexts for engine in engines) <= 1.25 * 8 * (group + 1) / 3 + 8
    mean = 30 * 8 / 3
    assert all(engine.contexts <= 1.25 * mean + 8 for engine in engines)


def test_an_engine_that_has_the_weights_is_preferred_to_a_lighter_one_that_has_not():
    engines = [engine(1, version=4), engine(2, version=5)]
    engines[1].contexts = 10
    assert pick(engines, version=5) is engines[1]
    assert pick(engines, version=6) is engines[0]


def test_the_avoided_engine_is_the_last_resort():
    engines = [engine(1), engine(2)]
    assert pick(engines, avoided=engines[0]) is engines[1]
    engines[1].ready = False
    assert pick(engines, avoided=engines[0]) is engines[0]
    engines[1].ready, engines[1].running = True, 1000
    assert pick(engines, avoided=engines[0]) is None  # it waits for the other, which lives


async def waiters(router, routes):
    tasks = [asyncio.ensure_future(router.enter(route)) for route in routes]
    await asyncio.sleep(0)
    return tasks


async def test_calls_wait_for_room_and_are_served_in_order():
    router = Router([engine(1, window=2)])
    routes = [Route(str(number)) for number in range(6)]
    tasks = await waiters(router, routes)
    assert [task.done() for task in tasks] == [True, True, False, False, False, False]
    assert router.waiting == 4 and router.trouble == ""
    for number in range(4):
        router.leave(tasks[number].result())
        await asyncio.sleep(0)
        assert [task.done() for task in tasks] == [True] * (3 + number) + [False] * (3 - number)
    assert router.engines[0].running == 2


async def test_a_route_stays_while_its_engine_can_be_called_and_leaves_one_that_is_much_more_loaded():
    one, two = engine(1, window=1), engine(2)
    router = Router([one, two])
    route, other = Route("a"), Route("b")
    router.attach(route, one)
    router.attach(other, one)
    two.contexts = 2
    place = await router.enter(route)
    assert place.engine is one
    (waiting,) = await waiters(router, [other])
    assert not waiting.done()  # both have as much to do
    two.contexts = 0
    router.dispatch()
    await asyncio.sleep(0)
    assert waiting.result().engine is two and other.engine is two
    assert (one.contexts, two.contexts) == (1, 1)


async def test_while_no_engine_can_be_called_all_wait():
    router = Router([engine(1), engine(2)])
    for each in router.engines:
        each.ready = False
    (waiting,) = await waiters(router, [Route("a")])
    assert not waiting.done() and router.trouble == "no engine is ready"
    router.engines[1].ready = True
    router.dispatch()
    assert (await waiting).engine is router.engines[1]


async def test_a_half_open_circuit_lets_one_of_many_through():
    (single,) = engines = [engine(1)]
    router = Router(engines)
    now_s = asyncio.get_running_loop().time()
    for _ in range(5):
        single.circuit.failed(now_s, probe=single.circuit.enter(now_s))
    tasks = await waiters(router, [Route(str(number)) for number in range(100)])
    assert not any(task.done() for task in tasks)
    assert router.trouble == "every engine that is ready has failed lately"
    single.circuit.try_now(0)
    router.dispatch()
    await asyncio.sleep(0)
    assert sum(task.done() for task in tasks) == 1
    place = tasks[0].result()
    assert place.probe
    single.circuit.succeeded(probe=True)
    router.leave(place)
    await asyncio.sleep(0)
    assert all(task.done() for task in tasks)


async def test_an_engine_that_leaves_passes_its_line_on():
    one, two = engine(1, window=1), engine(2, window=1)
    router = Router([one, two])
    first, second = Route("a"), Route("b")
    router.attach(first, one)
    router.attach(second, one)
    await router.enter(first)
    two.contexts = 5
    (waiting,) = await waiters(router, [second])
    router.engines.remove(one)
    router.dispatch()
    assert (await waiting).engine is two


async def test_the_window_grows_for_those_who_wait():
    (single,) = engines = [engine(1)]
    single.window = type(single.window)(WindowLimits(1, 2, 100))
    router = Router(engines)
    tasks = await waiters(router, [Route(str(number)) for number in range(4)])
    assert single.wanted
    single.observe(Load(0, 2, 0, 0.1), asked_at=2)
    router.dispatch()
    await asyncio.sleep(0)
    assert all(task.done() for task in tasks)


@pytest.mark.parametrize("seed", range(20))
async def test_no_place_is_lost_and_none_given_twice(seed):
    """Calls come, end, fail and are given up at random, engines come and go: at the end all are free, nobody waits, and
    every circuit lets a call through."""
    draw, loop = random.Random(seed), asyncio.get_running_loop()
    engines = [engine(number, window=draw.randint(1, 3)) for number in range(3)]
    for one in engines:
        one.circuit = Circuit(CircuitLimits(failures=2, first_s=0.002, longest_s=0.01))
    router = Router(engines, affinity=draw.choice([0, 4]))

    async def episode(number):
        route = Route(f"{number % 5}")
        for _ in range(3):
            entering = asyncio.ensure_future(router.enter(route))
            if draw.random() < 0.2:
                await asyncio.sleep(0)
                entering.cancel()
                await asyncio.wait([entering])
                if not entering.cancelled():  # it had its place already
                    router.leave(entering.result())
                continue
            place = await entering
            assert place.engine.running <= place.engine.window.size
            await asyncio.sleep(draw.random() / 500)
            match draw.choice(["succeeded", "failed", "given up"]):
                case "succeeded":
                    place.engine.circuit.succeeded(probe=place.probe)
                case "failed":
                    place.engine.circuit.failed(loop.time(), probe=place.probe)
            router.leave(place)
        router.attach(route, None)

    async def weather():
        while True:
            one = draw.choice(engines)
            one.ready = draw.random() < 0.8
            router.dispatch()
            await asyncio.sleep(0.001)

    changing = asyncio.create_task(weather())
    episodes = asyncio.gather(*(episode(number) for number in range(40)))
    await asyncio.wait_for(episodes, 60)
    changing.cancel()
    assert [one.running for one in engines] == [0, 0, 0]
    assert [one.contexts for one in engines] == [0, 0, 0]
    assert router.waiting == 0
    assert all(one.circuit.admits(loop.time() + 1) for one in engines)
