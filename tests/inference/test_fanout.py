"""Eight pullers as processes: the trainer sends about one copy, whoever dies and whoever lies."""

from __future__ import annotations

import asyncio

import ml_dtypes
import numpy as np
import pytest

from services.trainer.snapshot import Snapshot
from tests.inference import fleet

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
        assert sent["full"] <= 1.5 * first.size_bytes

        # The next one as a difference, which is small, and goes on from engine to engine as it is.
        await fleet.all_watch(trainer, ENGINES, held=1)
        second = trainer.publish(2, tensors(2))
        reports = await all_have(engines, second)
        async with trainer.store.lease(2, 1) as lease:
            assert lease is not None
            one_copy = lease.shipment.size_bytes
        assert one_copy < second.size_bytes / 25
        assert sent["delta"] <= 1.5 * one_copy
        assert sent["full"] <= 1.5 * first.size_bytes
        assert sum(report["bytes"].get("peer delta", 0) for report in reports) >= (ENGINES - 1.5) * one_copy

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
        # At the worst it was the first, and both of its children asked for new peers before the trainer had noticed.
        assert sent.total() <= 3 * third.size_bytes

        # And comes back empty: it gets all of it from those who have it.
        await fleet.all_watch(trainer, ENGINES - 1, held=3)
        before = sent.total()
        async with fleet.pullers(trainer.address, ["--name", "engine-1", "--serves"]) as (again,):
            (report,) = await all_have([again], third)
        assert report["bytes"] == {"peer full": third.size_bytes}
        assert sent.total() == before


async def test_without_peers_and_without_bulk_it_is_as_exact():
    async with (
        fleet.trainer(bulk=False) as trainer,
        fleet.pullers(trainer.address, ["--no-bulk"], ["--forgets"]) as engines,
    ):
        for version in (1, 2):
            await fleet.all_watch(trainer, 2, held=version - 1)
            await all_have(engines, trainer.publish(version, tensors(version)))
        assert trainer.engines.sent_bytes["full"] == 3 * 32 * MIB
