"""Eight pullers as processes: the trainer sends about one copy, whoever dies and whoever lies."""

from __future__ import annotations

import asyncio
import contextlib

import ml_dtypes
import numpy as np
import pytest

from headrace import rpc
from headrace.v1 import trainer_service_pb2 as pb
from headrace.v1 import trainer_service_pb2_grpc
from services.trainer.snapshot import Snapshot
from tests.inference import fleet, pulls
from tests.processes import free_port

ENGINES = 8
MIB = 1024 * 1024


def tensors(version: int) -> dict[str, np.ndarray]:
    """32 MiB in bfloat16, of which each version changes about a hundredth."""
    arrays = {}
    for index in range(16):
        words = np.random.default_rng(index).integers(0, 2**16, MIB, dtype=np.uint16)
        words[:: 100 + index] ^= version
        arrays[f"tensor.{index:02}"] = words.view(ml_dtypes.bfloat16)
    return arrays


async def all_have(engines: list[fleet.Puller], snapshot: Snapshot) -> list[dict]:
    reports = await asyncio.gather(*(engine.report(snapshot.policy_version) for engine in engines))
    for report in reports:
        assert report["hashes"] == [tensor.hash for tensor in snapshot.manifest.tensors]
    return reports


@pytest.mark.timeout(600)  # ten processes on a machine that may be busy
async def test_the_trainer_sends_one_copy_to_eight_engines():
    async with (
        fleet.trainer() as trainer,
        fleet.pullers(trainer.address, *[["--serves"]] * ENGINES) as engines,
    ):
        sent = trainer.engines.sent_bytes
        await fleet.all_watch(trainer, ENGINES)
        first = trainer.publish(1, tensors(1))
        await all_have(engines, first)
        assert sent["full"] <= 1.1 * first.size_bytes

        # The next one as a difference, which is small, and goes on from engine to engine as it is.
        await fleet.all_watch(trainer, ENGINES, held=1)
        second = trainer.publish(2, tensors(2))
        reports = await all_have(engines, second)
        async with trainer.store.lease(2, 1) as lease:
            assert lease is not None
            one_copy = lease.shipment.size_bytes
        assert one_copy < second.size_bytes / 25
        assert sent["delta"] <= 1.1 * one_copy
        assert sent["full"] <= 1.1 * first.size_bytes
        assert sum(report["bytes"].get("peer delta", 0) for report in reports) >= (ENGINES - 1.1) * one_copy

        # One dies in the middle of a pull, without a word. Everything changes in this version.
        await fleet.all_watch(trainer, ENGINES, held=2)
        sent.clear()
        random = np.random.default_rng(3)
        third = trainer.publish(
            3, {name: random.permutation(array.view(np.uint16)).view(array.dtype) for name, array in tensors(3).items()}
        )
        async with asyncio.timeout(fleet.DEADLINE_S):
            while not sent:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        engines[1].kill()
        await all_have([engines[0], *engines[2:]], third)
        # At the worst it was the first and had nearly all of it.
        assert sent.total() <= 2.1 * third.size_bytes

        # And comes back empty: it gets all of it from those who have it.
        await fleet.all_watch(trainer, ENGINES - 1, held=3)
        before = sent.total()
        async with fleet.pullers(trainer.address, ["--name", "engine-1", "--serves"]) as (again,):
            (report,) = await all_have([again], third)
        assert report["bytes"] == {"peer full": third.size_bytes}
        assert sent.total() == before


async def test_a_dead_root_costs_one_copy_even_while_the_trainer_believes_that_it_lives():
    arrays = tensors(1)
    async with contextlib.AsyncExitStack() as stack:
        trainer = await stack.enter_async_context(fleet.trainer())
        snapshot = trainer.publish(1, arrays)
        channel = await stack.enter_async_context(rpc.channel(trainer.address))
        stub, nowhere = trainer_service_pb2_grpc.TrainerServiceStub(channel), f"127.0.0.1:{free_port()}"
        root = stub.WatchWeights(pb.WatchWeightsRequest(engine="root", serving_address=nowhere))
        assert not (await root.read()).peers
        engines = [
            await stack.enter_async_context(pulls.pulling(trainer.address, name=f"engine-{number}", serves=True))
            for number in range(5)
        ]
        for engine in engines:
            await engine.has(1, arrays)
        assert trainer.engines.sent_bytes.total() == snapshot.size_bytes

        # And of a difference one copy, which goes on as a difference.
        root.cancel()
        root = stub.WatchWeights(pb.WatchWeightsRequest(engine="root", held_policy_version=1, serving_address=nowhere))
        stack.callback(root.cancel)
        await fleet.all_watch(trainer, 6, held=1)
        arrays = tensors(2)
        trainer.publish(2, arrays)
        for engine in engines:
            await engine.has(2, arrays)
        async with trainer.store.lease(2, 1) as lease:
            assert lease is not None
            one_copy = lease.shipment.size_bytes
        assert trainer.engines.sent_bytes == {"full": snapshot.size_bytes, "delta": one_copy}
        assert all(engine.bytes["peer", "full"] in (0, snapshot.size_bytes) for engine in engines)
        assert [cause for engine in engines for cause in engine.causes].count("dead") >= 2


async def test_without_peers_and_without_bulk_it_is_as_exact():
    async with (
        fleet.trainer(bulk=False) as trainer,
        fleet.pullers(trainer.address, ["--no-bulk"], ["--forgets"]) as engines,
    ):
        for version in (1, 2):
            await fleet.all_watch(trainer, 2, held=version - 1)
            await all_have(engines, trainer.publish(version, tensors(version)))
        assert trainer.engines.sent_bytes["full"] == 3 * 32 * MIB
