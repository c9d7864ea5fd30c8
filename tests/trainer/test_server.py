"""services.trainer.server through a real gRPC server and channel."""

import asyncio
from collections import Counter

import grpc
import numpy as np
import pytest

from headrace import rpc, weights
from headrace.v1 import trainer_service_pb2 as pb
from headrace.v1 import trainer_service_pb2_grpc
from services.trainer.server import SERVICE, Engines, TrainerServicer
from services.trainer.status import Status
from services.trainer.weights import WeightStore, take_snapshot


@pytest.fixture
async def service():
    store, status = WeightStore(kept_versions=2), Status("run", 10)
    servicer = TrainerServicer(store, status, Engines())
    add = trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server
    server = await rpc.Server.start("127.0.0.1:0", [rpc.Service(SERVICE, add, servicer)])
    async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
        yield trainer_service_pb2_grpc.TrainerServiceStub(channel), store, status
    await server.stop(0)


def snapshot(version, floats=100):
    return take_snapshot(version, [("a", np.full(floats, version, np.float32)), ("b", np.ones((2, 2), np.float32))])


async def pull(call):
    """The manifest and each tensor's bytes, as they came."""
    manifest = (await call.read()).manifest
    data = [bytearray() for _ in manifest.tensors]
    while (response := await call.read()) is not grpc.aio.EOF:
        chunk = response.chunk
        assert chunk.offset == len(data[chunk.tensor_index])
        data[chunk.tensor_index] += chunk.data
    return manifest, data


async def test_watch_then_get(service):
    stub, store, _ = service
    store.publish(snapshot(3))
    watch = stub.WatchWeights(pb.WatchWeightsRequest(engine="e"))
    news = await watch.read()
    assert (news.run_id, news.policy_version, news.size_bytes) == ("run", 3, 416)
    request = pb.GetWeightsRequest(run_id="run", policy_version=3, base_policy_version=2)
    manifest, data = await pull(stub.GetWeights(request))
    assert not manifest.HasField("base_policy_version")
    assert manifest.root_hash == news.root_hash == weights.root_hash(manifest.tensors)
    assert [weights.tensor_hash(memoryview(bytes(part))) for part in data] == [t.hash for t in manifest.tensors]
    np.testing.assert_array_equal(np.frombuffer(data[0], np.float32), np.full(100, 3))
    store.publish(snapshot(4))
    assert (await watch.read()).policy_version == 4
    watch.cancel()


async def test_watching_begins_before_there_is_anything(service):
    stub, store, _ = service
    watch = stub.WatchWeights(pb.WatchWeightsRequest(engine="e"))
    waiting = asyncio.ensure_future(watch.read())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    store.publish(snapshot(1))
    assert (await waiting).policy_version == 1
    store.close()
    assert await watch.read() is grpc.aio.EOF


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (pb.GetWeightsRequest(run_id="run", policy_version=1), grpc.StatusCode.NOT_FOUND),
        (pb.GetWeightsRequest(run_id="run", policy_version=9), grpc.StatusCode.NOT_FOUND),
        (pb.GetWeightsRequest(run_id="other", policy_version=3), grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
async def test_what_is_not_there(service, request_, code):
    stub, store, _ = service
    for version in (1, 2, 3):
        store.publish(snapshot(version))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await pull(stub.GetWeights(request_))
    assert error.value.code() == code


async def test_a_slow_reader_gets_its_version_whole_though_newer_ones_come(service):
    stub, store, _ = service
    store.publish(snapshot(1, floats=20_000_000))  # far more than what connections buffer
    call = stub.GetWeights(pb.GetWeightsRequest(run_id="run", policy_version=1))
    manifest = (await call.read()).manifest
    first = (await call.read()).chunk
    for version in range(2, 7):
        store.publish(snapshot(version, floats=20_000_000))
    data = [bytearray(first.data), bytearray()]
    while (response := await call.read()) is not grpc.aio.EOF:
        data[response.chunk.tensor_index] += response.chunk.data
    assert [weights.tensor_hash(memoryview(bytes(part))) for part in data] == [t.hash for t in manifest.tensors]
    assert store.get(1) is None


async def test_status(service):
    stub, store, status = service
    store.publish(snapshot(1))
    status.step, status.phase = 4, pb.TRAINER_PHASE_WAITING
    status.returned_groups = Counter({("a", "too_stale"): 2, ("b", "too_stale"): 1})
    watch = stub.WatchWeights(pb.WatchWeightsRequest(engine="engine-0", held_policy_version=7))
    await watch.read()
    reply = await stub.GetTrainerStatus(pb.GetTrainerStatusRequest())
    assert (reply.run_id, reply.step, reply.total_steps, reply.phase) == ("run", 4, 10, pb.TRAINER_PHASE_WAITING)
    assert dict(reply.returned_groups) == {"too_stale": 3}
    assert dict(reply.engine_versions) == {"engine-0": 7}
    watch.cancel()


async def test_engines_are_waited_for_until_all_hold_a_version():
    engines = Engines()
    await asyncio.wait_for(engines.all_hold(5), 60)  # nobody is there
    engines.enter("a", 5)
    engines.enter("b", 4)
    waiting = asyncio.ensure_future(engines.all_hold(5))
    await asyncio.sleep(0)
    engines.leave("b")  # it swaps the version in
    await asyncio.sleep(0)
    assert not waiting.done()
    engines.enter("b", 5)
    await asyncio.wait_for(waiting, 60)
    assert engines.versions == {"a": 5, "b": 5}
