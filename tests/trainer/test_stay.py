"""A trainer that may not exit when its run has ended: a StatefulSet would start it again, for ever."""

import pytest

from headrace import rpc
from headrace.v1 import trainer_service_pb2 as pb
from headrace.v1 import trainer_service_pb2_grpc
from tests import processes
from tests.trainer import rig

pytestmark = pytest.mark.timeout(400)  # a busy machine may take a minute to import and compile


def finished(status):
    return status.phase == pb.TRAINER_PHASE_FINISHED


async def newest_root_hash(trainer):
    """Hash of the weights that an engine which comes now is offered."""
    async with rpc.channel(trainer.address) as channel:
        stub = trainer_service_pb2_grpc.TrainerServiceStub(channel)
        async for news in stub.WatchWeights(pb.WatchWeightsRequest(engine="late"), timeout=60):
            return news.root_hash


@pytest.mark.parametrize("end", [{"steps": 3}, {"steps": 50, "stop_at_reward": 0.5, "stop_window": 3}])
async def test_a_finished_trainer_serves_on_and_started_again_trains_no_more(streams, redis_url, tmp_path, end):
    with rig.trainer(rig.run_file(tmp_path, redis_url, **end), "--stay") as trainer:
        async with rig.serving(streams):
            await trainer.until(finished)
        policy, steps, cursor = await newest_root_hash(trainer), trainer.lines("metrics.jsonl"), await streams.cursor()
        trainer.process.kill()
        trainer.process.start()
        await trainer.until(finished)
        assert processes.serving(trainer.address)
        assert await newest_root_hash(trainer) == policy
        assert trainer.lines("metrics.jsonl") == steps
        assert await streams.cursor() == cursor
        trainer.process.terminate()
        assert await trainer.ended() == 0
