"""RolloutService over real gRPC."""

import asyncio
import contextlib
import dataclasses

import grpc
import pytest

from headrace import rpc, stream
from headrace.v1 import rollout_service_pb2 as pb
from headrace.v1 import rollout_service_pb2_grpc
from headrace.v1.trajectory_pb2 import EPISODE_STATUS_COMPLETED, PURPOSE_EVALUATION
from services.rollout.scheduler import Scheduler
from services.rollout.server import SERVICE_NAME, RolloutServicer
from services.rollout.slots import Slots
from tests.engine_script import Script
from tests.rollout import rig
from tests.rollout.rig import eventually, task
from tests.rollout.scripted_environment import ScriptedEnvironment, says, turns
from tests.scripted_engine import ScriptedEngine


@dataclasses.dataclass
class Gateway:
    """One gateway's parts, and a stub that calls it."""

    engine: ScriptedEngine
    environment: ScriptedEnvironment
    scheduler: Scheduler
    slots: Slots
    streams: stream.Streams
    stub: rollout_service_pb2_grpc.RolloutServiceStub

    async def episodes(self, *tasks, count=1, **sampling):
        request = pb.RunEpisodesRequest(tasks=tasks, episodes_per_task=count, sampling=pb.Sampling(**sampling))
        return [response async for response in self.stub.RunEpisodes(request)]

    async def status(self):
        return await self.stub.GetRolloutStatus(pb.GetRolloutStatusRequest())


@pytest.fixture
def start(tmp_path, redis_url):
    @contextlib.asynccontextmanager
    async def start(play, script=None):
        engine = await ScriptedEngine.start(script or Script(tokens="random"), policy_version=3)
        environment = await ScriptedEnvironment.start(play)
        client = stream.connect(redis_url, timeout_s=2)
        await client.flushdb()
        streams = stream.Streams(client, "run", claim_timeout_s=5)
        await streams.open()
        async with rig.world(tmp_path, engines=[engine.url], environment=environment.address) as world:
            slots = Slots(4)
            scheduler = Scheduler(streams, world, slots, gateway="gateway-0", run_id="run", claim_timeout_s=5)
            running = asyncio.create_task(scheduler.run())
            servicer = RolloutServicer(scheduler, world, slots, gateway="gateway-0")
            add = rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server
            server = await rpc.Server.start("127.0.0.1:0", [(SERVICE_NAME, add, servicer)])
            async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
                stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
                yield Gateway(engine, environment, scheduler, slots, streams, stub)
            await server.stop(0)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        await client.aclose()
        await environment.stop()
        await engine.stop()

    return start


async def test_episodes_stream_as_they_end_within_the_places(start):
    async with start(turns(2)) as gateway:
        before = await gateway.status()
        ended = await gateway.episodes(task(0), task(1, purpose=PURPOSE_EVALUATION), count=5, temperature=0.5)
        after = await gateway.status()
        assert gateway.slots.free == 4
    assert len(ended) == 10 and len({response.trajectory.trajectory_id for response in ended}) == 10
    assert all(response.trajectory.status == EPISODE_STATUS_COMPLETED for response in ended)
    assert {request["sampling_params"]["temperature"] for request in gateway.engine.requests} == {0.5}
    assert after.ended_episodes["completed"] - before.ended_episodes["completed"] == 10
    assert after.running_episodes == 0 and after.gateway == "gateway-0" and not after.draining
    (engine,) = after.engines
    assert engine.url == gateway.engine.url and engine.healthy and engine.policy_version == 3


async def test_calls_may_take_the_places_for_which_a_ticket_is_being_claimed(start):
    async def play(_task, _session):
        yield says("guess a number")
        await asyncio.sleep(1)
        yield says("found", 1.0, terminated=True)

    async with start(play) as gateway:
        calling = asyncio.create_task(gateway.episodes(task(0), count=3))
        await eventually(lambda: gateway.slots.free == 1)
        await gateway.streams.issue([task(1)], first_sequence=0)
        assert len(await calling) == 3
        assert len(await gateway.streams.read_groups(1, 5)) == 1


async def test_sampling_may_be_greedy_and_short(start):
    async with start(turns(1)) as gateway:
        await gateway.episodes(task(0), temperature=0.0, max_action_tokens=1)
        await gateway.episodes(task(0))
    sampled = [request["sampling_params"] for request in gateway.engine.requests]
    assert [(one["temperature"], one["max_new_tokens"]) for one in sampled] == [(0.0, 1), (1.0, 2)]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (pb.RunEpisodesRequest(tasks=[task(environment="chess")], episodes_per_task=1), grpc.StatusCode.NOT_FOUND),
        (pb.RunEpisodesRequest(tasks=[task(split="")], episodes_per_task=1), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.RunEpisodesRequest(tasks=[task()]), grpc.StatusCode.INVALID_ARGUMENT),
        (
            pb.RunEpisodesRequest(tasks=[task()], episodes_per_task=1, sampling=pb.Sampling(temperature=-1)),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            pb.RunEpisodesRequest(tasks=[task()], episodes_per_task=1, sampling=pb.Sampling(max_action_tokens=0)),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
)
async def test_what_cannot_be_run_is_refused(start, request_, code):
    async with start(turns(1)) as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await anext(aiter(gateway.stub.RunEpisodes(request_)))
    assert error.value.code() == code


async def test_a_caller_that_hangs_up_ends_its_episodes(start):
    async def play(_task, _session):
        yield says("guess a number")
        await asyncio.sleep(60)
        yield says("found", 1.0, terminated=True)

    async with start(play) as gateway:
        call = gateway.stub.RunEpisodes(pb.RunEpisodesRequest(tasks=[task()], episodes_per_task=9))
        reading = asyncio.create_task(anext(aiter(call)))
        await eventually(lambda: gateway.environment.open == 4)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await eventually(lambda: gateway.environment.open == 0 and gateway.slots.free == 4)


async def test_a_drained_gateway_says_so(start):
    async with start(turns(1)) as gateway:
        assert (await gateway.stub.Drain(pb.DrainRequest(timeout_s=1))).unfinished_groups == 0
        assert (await gateway.status()).draining
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await gateway.episodes(task())
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
