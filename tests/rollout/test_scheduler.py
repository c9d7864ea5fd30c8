"""Tickets in, groups out, over a real Redis: one ticket, one group, whatever fails."""

import asyncio
import contextlib

import pytest
from redis.exceptions import RedisError

from headrace import stream
from headrace import trajectory as records
from headrace.v1 import trajectory_pb2 as pb
from services.rollout.scheduler import Scheduler
from services.rollout.slots import Slots
from tests import processes
from tests.engine_script import Script
from tests.rollout import rig
from tests.rollout.rig import VOCABULARY_SIZE, eventually, task
from tests.rollout.scripted_environment import ScriptedEnvironment, says, turns
from tests.scripted_engine import ScriptedEngine

RUN = "run"
TASKS = "headrace:{run}:tasks"


class Rig:
    """Gateways of one run, and the trainer's end of its streams."""

    def __init__(self, url, engine, environment, world, *, claim_timeout_s):
        self.url, self.engine, self.environment, self.world = url, engine, environment, world
        self.claim_timeout_s = claim_timeout_s
        self.client = stream.connect(url, timeout_s=2)
        self.streams = stream.Streams(self.client, RUN, claim_timeout_s=claim_timeout_s)
        self.issued = 0

    async def issue(self, *tasks):
        await self.streams.issue(tasks, first_sequence=self.issued)
        self.issued += len(tasks)

    async def groups(self, count):
        """The next `count` groups; each can be true."""
        entries = []
        async with asyncio.timeout(20):
            while len(entries) < count:
                with contextlib.suppress(RedisError):  # it may be starting
                    entries += await self.streams.read_groups(count - len(entries), 0.2)
        return [pb.TrajectoryGroup.FromString(entry.payload) for entry in entries]

    async def held_ticket(self):
        """Id of the one claimed ticket."""
        (pending,) = await self.client.xpending_range(TASKS, "gateways", "-", "+", 2)
        return pending["message_id"].decode()

    @contextlib.asynccontextmanager
    async def gateway(self, name="gateway-0", *, world=None, slots=None):
        """A running scheduler; cut off at the end unless it was drained."""
        client = stream.connect(self.url, timeout_s=2)
        scheduler = Scheduler(
            stream.Streams(client, RUN, claim_timeout_s=self.claim_timeout_s),
            world or self.world,
            slots or Slots(8),
            gateway=name,
            run_id=RUN,
            claim_timeout_s=self.claim_timeout_s,
        )
        running = asyncio.create_task(scheduler.run())
        try:
            yield scheduler
            if scheduler.draining:
                await running
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await client.aclose()


@pytest.fixture
def start(tmp_path, redis_url):
    @contextlib.asynccontextmanager
    async def start(play, script=None, *, url=None, claim_timeout_s=0.6, **overrides):
        engine = await ScriptedEngine.start(script or Script(tokens="random"), policy_version=3)
        environment = await ScriptedEnvironment.start(play)
        addresses = {"engines": [engine.url], "environment": environment.address}
        async with rig.world(tmp_path, **addresses, **overrides) as world:
            run = Rig(url or redis_url, engine, environment, world, claim_timeout_s=claim_timeout_s)
            if url is None:
                await run.client.flushdb()
            await run.streams.open()
            yield run
            await run.client.aclose()
        await environment.stop()
        await engine.stop()

    return start


def sleeps(seconds, *, only=None):
    """One turn that takes so long, in the given session or in each."""

    async def play(_task, session):
        yield says("guess a number")
        if only is None or session in only:
            await asyncio.sleep(seconds)
        yield says("found", 1.0, terminated=True)

    return play


def check(group):
    records.check_group(group, run_id=RUN, vocabulary_size=VOCABULARY_SIZE)


async def test_every_ticket_becomes_one_group(start):
    async with start(turns(2)) as run, run.gateway():
        await run.issue(*(task(number) for number in range(20)))
        groups = await run.groups(20)
        assert await run.streams.ticket_count() == 0
    assert sorted(group.task.task_id for group in groups) == [task(number).task_id for number in range(20)]
    for group in groups:
        check(group)
        assert group.gateway == "gateway-0" and len(group.trajectories) == 2
        assert all(records.is_trainable(trajectory) for trajectory in group.trajectories)


async def test_places_are_never_exceeded_and_all_come_back(start):
    slots, most = Slots(6), 0
    async with start(sleeps(0.05), rollout__group_size=2) as run, run.gateway(slots=slots):
        await run.issue(*(task(number, purpose=1 + 2 * (number % 5 == 0)) for number in range(15)))
        reading = asyncio.create_task(run.groups(15))
        while not reading.done():
            most = max(most, run.environment.open)
            await asyncio.sleep(0.005)
        await reading
        await eventually(lambda: slots.free == 6)
    assert 4 <= most <= 6


async def test_what_cannot_be_run_ends_with_its_reason(start):
    async with start(turns(1)) as run, run.gateway():
        await run.issue(task(0, environment="chess"))
        await run.client.xadd(TASKS, {"record": b"\xff\xff"})
        await run.issue(task(1))
        groups = await run.groups(3)
        assert await run.streams.ticket_count() == 0
    by_id = {group.task.task_id: group for group in groups}
    (unknown,) = by_id["00000000"].trajectories
    assert unknown.status == pb.EPISODE_STATUS_ENVIRONMENT_ERROR
    assert "'chess' is unknown; the run's config has ['guess_number']" in unknown.status_detail
    check(by_id["00000000"])
    (malformed,) = by_id[""].trajectories
    assert "ticket is malformed" in malformed.status_detail
    check(by_id["00000001"])


async def test_an_unexpected_error_costs_its_group_and_not_the_gateway(start):
    class Broken:
        """A renderer that fails in a way that nobody foresaw."""

        stop_token_ids = (1,)

        def __init__(self, sound):
            self._sound = sound

        def first(self, messages, tools):
            if messages[0].content == "lower":
                raise ZeroDivisionError("by\nnobody")
            return self._sound.first(messages, tools)

        def __getattr__(self, name):
            return getattr(self._sound, name)

    async def play(task_, _session):
        yield says("lower" if task_.index == 1 else "higher")
        yield says("found", 1.0, terminated=True)

    async with start(play) as run:
        world = type(run.world)(
            run.world.settings, Broken(run.world.renderer), run.world.engines, run.world.environments
        )
        async with run.gateway(world=world):
            await run.issue(*(task(number) for number in range(3)))
            groups = {group.task.index: group for group in await run.groups(3)}
    assert [trajectory.status_detail for trajectory in groups[1].trajectories] == [
        "gateway: ZeroDivisionError: by nobody"
    ]
    assert groups[1].trajectories[0].status == pb.EPISODE_STATUS_CANCELLED
    for group in groups.values():
        check(group)
    assert sum(records.is_trainable(trajectory) for trajectory in groups[0].trajectories) == 2


async def test_a_failing_environments_group_is_published(start):
    async def play(_task, _session):
        raise RuntimeError("out of fuel")
        yield

    async with start(play) as run, run.gateway():
        await run.issue(task(0))
        (group,) = await run.groups(1)
    check(group)
    assert {trajectory.status for trajectory in group.trajectories} == {pb.EPISODE_STATUS_ENVIRONMENT_ERROR}


async def test_long_work_keeps_its_claim(start):
    async with start(sleeps(1.5), claim_timeout_s=0.3) as run, run.gateway("a"), run.gateway("b"):
        await run.issue(task(0))
        (group,) = await run.groups(1)
        check(group)
        assert len(run.environment.tasks) == 2  # one group's episodes: nobody took it over


async def test_a_lost_claim_is_abandoned(start):
    slots = Slots(8)
    async with start(sleeps(60, only={1, 2}), claim_timeout_s=3) as run, run.gateway("a", slots=slots):
        await run.issue(task(0))
        await eventually(lambda: run.environment.open == 2)
        # Another gateway takes the ticket, as it would have after a pause of this one.
        await run.client.xclaim(TASKS, "gateways", "b", 0, [await run.held_ticket()])
        await eventually(lambda: run.environment.open == 0 and slots.free == 8)
        assert await run.streams.ticket_count() == 1 and await run.streams.group_count() == 0


async def test_a_claim_that_redis_forgot_is_renewed_and_its_ticket_run_once(start):
    slots = Slots(8)
    async with start(sleeps(2.0), claim_timeout_s=60) as run, run.gateway(slots=slots) as gateway:
        await run.issue(task(0))
        await eventually(lambda: run.environment.open == 2)
        # As after a restart of Redis without its last second.
        await run.client.xack(TASKS, "gateways", await run.held_ticket())
        await run.client.xgroup_setid(TASKS, "gateways", "0")
        check((await run.groups(1))[0])
        assert len(run.environment.tasks) == 2
        assert await gateway.drain(5) == 0 and slots.free == 8


async def test_a_late_publication_is_discarded(start):
    async with start(sleeps(1.0), claim_timeout_s=60) as run, run.gateway("slow") as slow:
        await run.issue(task(0))
        await eventually(lambda: run.environment.open == 2)
        assert await run.streams.publish(
            await run.held_ticket(), pb.TrajectoryGroup(task=task(0), run_id=RUN, gateway="fast")
        )
        await eventually(lambda: slow.running_groups == 0)
        assert [group.gateway for group in await run.groups(1)] == ["fast"]
        assert await run.streams.group_count() == 1


async def test_a_silent_gateways_tickets_are_taken_over(start):
    async with start(turns(1), claim_timeout_s=0.3) as run:
        await run.issue(*(task(number) for number in range(5)))
        assert len(await run.streams.claim("dead", 5, 0)) == 5
        async with run.gateway("alive"):
            groups = await run.groups(5)
    assert {group.gateway for group in groups} == {"alive"}
    assert len({group.task.task_id for group in groups}) == 5


async def test_a_drain_lets_groups_end(start):
    async with start(sleeps(0.5)) as run, run.gateway() as gateway:
        await run.issue(task(0))
        await eventually(lambda: run.environment.open == 2)
        assert await gateway.drain(10) == 0
        await run.issue(task(1))
        check((await run.groups(1))[0])
        await asyncio.sleep(0.3)
        assert await run.streams.ticket_count() == 1


async def test_a_drain_gives_back_what_does_not_end(start):
    async with start(sleeps(60, only={1, 2}), claim_timeout_s=60) as run:
        async with run.gateway("a") as gateway:
            await run.issue(task(0))
            await eventually(lambda: run.environment.open == 2)
            assert await gateway.drain(0.1) == 1
            await eventually(lambda: run.environment.open == 0)
        async with run.gateway("b"):
            (group,) = await run.groups(1)
    assert group.gateway == "b"
    check(group)


async def test_redis_goes_and_comes_back(start, tmp_path):
    """Groups end while Redis is away: they are held, nothing new is claimed, and nothing is lost or doubled."""
    folder = tmp_path / "redis"
    folder.mkdir()
    with processes.redis_server(folder) as (url, server):
        limits = {"rollout__max_unpublished_groups": 2, "claim_timeout_s": 5}
        async with start(sleeps(0.4), url=url, **limits) as run, run.gateway(slots=Slots(4)) as gateway:
            await run.issue(*(task(number) for number in range(12)))
            await eventually(lambda: run.environment.open == 4)
            server.kill()
            await eventually(lambda: run.environment.open == 0)
            await asyncio.sleep(0.5)
            assert run.environment.open == 0 and gateway.running_groups == 2
            server.start()
            groups = await run.groups(12)
            assert await run.streams.ticket_count() == 0
    assert sorted(group.task.index for group in groups) == list(range(12))
