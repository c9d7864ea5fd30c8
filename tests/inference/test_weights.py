"""The weight puller against a real TrainerService: order, damage, absence, other runs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

import ml_dtypes
import numpy as np
import pytest

from headrace import rpc
from services.inference.weights import Hold, Puller, Version
from tests.inference.trainer import Trainer
from tests.processes import free_port


class Installed:
    """What the puller handed over, and how its pulls ended."""

    def __init__(self) -> None:
        self.versions: list[Version] = []
        self.outcomes: list[str] = []
        self.causes: list[str] = []
        self.bytes: Counter[tuple[str, str]] = Counter()
        self._changed = asyncio.Condition()

    async def install(self, version: Version) -> None:
        async with self._changed:
            self.versions.append(version)
            self._changed.notify_all()

    def pulled(self, outcome: str, seconds: float) -> None:
        self.outcomes.append(outcome)

    def received(self, sender: str, kind: str, size_bytes: int) -> None:
        self.bytes[sender, kind] += size_bytes

    def fell_back(self, cause: str) -> None:
        self.causes.append(cause)

    async def wait_for(self, *versions: int) -> None:
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: [v.policy_version for v in self.versions] == list(versions))


@pytest.fixture
async def trainer() -> AsyncIterator[Trainer]:
    trainer = await Trainer().start()
    yield trainer
    await trainer.stop()


def _tensors(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "model.norm.weight": rng.normal(size=7).astype(np.float32),
        "model.embed_tokens.weight": rng.normal(size=(300, 11)).astype(np.float32),
        "lm_head.weight": rng.normal(size=(300, 11)).astype(ml_dtypes.bfloat16),
        "empty": np.empty((0, 4), np.float32),
    }


def _puller(address: str, installed: Installed, hold: Hold | None = None) -> Puller:
    return Puller(
        rpc.channel(address),
        engine="engine-0",
        run_id="test",
        install=installed.install,
        observer=installed,
        hold=hold or Hold(),
    )


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)


async def test_every_version_arrives_bit_for_bit_and_the_trainer_hears_what_is_held(trainer):
    installed = Installed()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_puller(trainer.address, installed).run())
        await trainer.publish(3, _tensors(3))
        await installed.wait_for(3)
        await trainer.publish(9, _tensors(9))
        await installed.wait_for(3, 9)
        await _until(lambda: trainer.watches[-1] == 9)
        task.cancel()
    for version in installed.versions:
        expected = _tensors(version.policy_version)
        assert list(version.tensors) == list(expected)
        for name, array in expected.items():
            assert version.tensors[name].dtype == array.dtype
            np.testing.assert_array_equal(version.tensors[name], array)
    assert trainer.watches == [None, 3, 9]
    assert installed.outcomes == ["ok", "ok"]


async def test_damage_is_noticed_and_pulled_again(trainer):
    installed = Installed()
    trainer.damage_next = 2
    await trainer.publish(1, _tensors(1))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_puller(trainer.address, installed).run())
        await installed.wait_for(1)
        task.cancel()
    assert installed.outcomes == ["corrupt", "corrupt", "ok"]
    np.testing.assert_array_equal(
        installed.versions[0].tensors["model.embed_tokens.weight"], _tensors(1)["model.embed_tokens.weight"]
    )


async def test_a_version_that_is_gone_is_passed_over_for_the_next(trainer):
    installed = Installed()
    await trainer.publish(1, _tensors(1))
    trainer.forget(1)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_puller(trainer.address, installed).run())
        await _until(lambda: bool(trainer.gets))
        await trainer.publish(2, _tensors(2))
        await installed.wait_for(2)
        task.cancel()
    assert installed.outcomes[-1] == "ok"


async def test_an_older_version_is_never_installed(trainer):
    installed = Installed()
    await trainer.publish(5, _tensors(5))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_puller(trainer.address, installed).run())
        await installed.wait_for(5)
        await trainer.publish(4, _tensors(4))
        await asyncio.sleep(0.3)
        assert trainer.gets == [5]
        await trainer.publish(6, _tensors(6))
        await installed.wait_for(5, 6)
        task.cancel()


async def test_another_runs_weights_are_refused(trainer, caplog):
    installed = Installed()
    trainer.run_id = "other"
    await trainer.publish(1, _tensors(1))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_puller(trainer.address, installed).run())
        await _until(lambda: "wrong_run" in installed.outcomes)
        assert not trainer.gets
        assert "works on run 'other', but this engine belongs to run 'test'" in caplog.text
        task.cancel()


async def test_the_trainer_may_start_later_and_restart():
    installed = Installed()
    port = free_port()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_puller(f"127.0.0.1:{port}", installed).run())
        await asyncio.sleep(0.3)
        for version in (1, 2, 3):
            trainer = await Trainer().start(port)
            await trainer.publish(version, _tensors(version))
            await installed.wait_for(*range(1, version + 1))
            await trainer.stop()
        task.cancel()


async def test_a_held_engine_keeps_its_version_until_it_is_released(trainer):
    installed, hold = Installed(), Hold()
    hold.set(600)  # the first version is taken all the same: an engine without weights serves nobody
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_puller(trainer.address, installed, hold).run())
        await trainer.publish(3, _tensors(3))
        await installed.wait_for(3)
        await _until(lambda: trainer.watches[-1] == 3)
        await trainer.publish(4, _tensors(4))
        await asyncio.sleep(0.3)  # that nothing happens is under test
        assert [version.policy_version for version in installed.versions] == [3]
        hold.set(0)
        await installed.wait_for(3, 4)
        task.cancel()


async def test_a_hold_ends_by_itself(trainer):
    installed, hold = Installed(), Hold()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_puller(trainer.address, installed, hold).run())
        await trainer.publish(3, _tensors(3))
        await installed.wait_for(3)
        hold.set(0.2)
        await trainer.publish(4, _tensors(4))
        await installed.wait_for(3, 4)
        assert hold.remaining_s == 0
        task.cancel()
