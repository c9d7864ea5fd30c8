"""services.trainer.weights: snapshots stay what they are; watchers get the newest."""

import asyncio

import ml_dtypes
import numpy as np
import pytest

from headrace import weights
from services.trainer.weights import Snapshot, WeightStore, take_snapshot


def snapshot(version, fill=None):
    value = version if fill is None else fill
    return take_snapshot(version, [("a", np.full((2, 3), value, np.float32)), ("b", np.full(5, value, np.float32))])


def test_a_snapshot_tells_what_it_holds():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    result = take_snapshot(7, [("x", array), ("y", array.astype(ml_dtypes.bfloat16).T)])
    x, y = result.manifest.tensors
    assert (x.name, list(x.shape), list(y.shape)) == ("x", [2, 3], [3, 2])
    assert [weights.tensor_hash(data) for data in result.data] == [x.hash, y.hash]
    assert result.manifest.root_hash == weights.root_hash([x, y])
    assert result.size_bytes == 24 + 12


def test_equal_weights_have_equal_identity_whatever_their_version():
    assert snapshot(1, fill=5).manifest.root_hash == snapshot(2, fill=5).manifest.root_hash
    assert snapshot(1, fill=5).manifest.root_hash != snapshot(1, fill=6).manifest.root_hash


async def test_only_the_newest_versions_are_kept():
    store = WeightStore(kept_versions=2)
    for version in (1, 2, 5):
        store.publish(snapshot(version))
    assert [store.get(version) is not None for version in (1, 2, 5, 9)] == [False, True, True, False]


async def test_a_slow_watcher_gets_only_the_newest():
    store = WeightStore(kept_versions=2)
    store.publish(snapshot(1))
    watch = store.watch()
    assert (await anext(watch)).policy_version == 1
    for version in (2, 3, 4):
        store.publish(snapshot(version))
    assert (await anext(watch)).policy_version == 4
    waiting = asyncio.ensure_future(anext(watch, None))
    await asyncio.sleep(0)
    store.publish(snapshot(6))
    assert (await waiting).policy_version == 6
    store.close()
    assert await anext(watch, None) is None


def with_first(version, first):
    """100,000 numbers of which only the first differs."""
    array = np.arange(100_000, dtype=np.float32)
    array[0] = first
    return take_snapshot(version, [("a", array), ("b", np.ones(3, np.float32))])


async def test_a_base_that_is_kept_gets_the_difference_and_others_all():
    store = WeightStore(kept_versions=1, delta_bases=2)
    for version in (1, 2, 4, 7):
        store.publish(with_first(version, version))
    assert store.in_memory == [2, 4, 7]
    assert [store.has_delta(7, base) for base in (0, 1, 2, 4, 7)] == [False, False, True, True, False]
    for base, size_bytes in ((None, 400_012), (1, 400_012), (7, 400_012), (9, 400_012)):
        async with store.lease(7, base) as lease:
            assert lease.shipment.size_bytes == size_bytes
            assert not lease.shipment.manifest.HasField("base_policy_version")
    for base in (2, 4):
        async with store.lease(7, base) as lease:
            manifest = lease.shipment.manifest
            assert manifest.base_policy_version == base
            assert manifest.root_hash == store.get(7).manifest.root_hash
            assert lease.shipment.size_bytes < 100
            assert [parcel.size_bytes > 0 for parcel in manifest.parcels] == [True, False]
            async with store.lease(7, base) as other:
                assert other.shipment is lease.shipment  # made once


async def test_a_difference_that_cannot_be_made_costs_no_version(caplog):
    store = WeightStore(kept_versions=2, delta_bases=1)
    whole = with_first(1, 1)
    store.publish(Snapshot(whole.manifest, (whole.data[0][:-4], whole.data[1])))  # as if it had lost a number
    store.publish(with_first(2, 2))
    for _ in range(2):
        async with store.lease(2, 1) as lease:
            assert lease.shipment.size_bytes == 400_012
            assert not lease.shipment.manifest.HasField("base_policy_version")
    assert "no difference from version 1 to 2" in caplog.text


async def test_differences_can_be_switched_off():
    store = WeightStore(kept_versions=3, delta_bases=0)
    for version in (1, 2):
        store.publish(with_first(version, version))
    assert not store.has_delta(2, 1)
    async with store.lease(2, 1) as lease:
        assert lease.shipment.size_bytes == 400_012


async def test_a_tensor_of_another_shape_or_name_travels_whole():
    store = WeightStore(kept_versions=2, delta_bases=1)
    store.publish(take_snapshot(1, [("a", np.ones((2, 3), np.float32)), ("old", np.ones(3, np.float32))]))
    store.publish(take_snapshot(2, [("a", np.ones((3, 2), np.float32)), ("new", np.ones(3, np.float32))]))
    async with store.lease(2, 1) as lease:
        assert [parcel.size_bytes for parcel in lease.shipment.manifest.parcels] == [24, 12]


async def test_a_version_is_kept_for_its_readers_and_no_longer():
    store = WeightStore(kept_versions=1)
    store.publish(snapshot(1))
    async with store.lease(1, None) as first:
        async with store.lease(1, None) as second:
            for version in range(2, 12):
                store.publish(snapshot(version))
            assert store.in_memory == [1, 11]
            assert first.shipment is second.shipment
        assert store.in_memory == [1, 11]
        async with store.lease(1, None) as late:
            assert late is None  # others cannot have it any more
    assert store.in_memory == [11]


async def test_a_base_may_go_while_the_difference_to_it_is_made_and_read():
    store = WeightStore(kept_versions=1, delta_bases=1)
    store.publish(with_first(1, 1))
    store.publish(with_first(2, 2))

    async def read():
        async with store.lease(2, 1) as lease:
            await asyncio.sleep(0)
            return lease.shipment

    reading = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    for version in (3, 4, 5):
        store.publish(with_first(version, version))
    assert (await reading).manifest.base_policy_version == 1
    assert store.in_memory == [4, 5]


async def test_what_readers_hold_is_bounded_and_the_oldest_are_cut():
    store = WeightStore(kept_versions=1)
    ended = []

    async def read(version):
        async with store.lease(version, None) as lease:
            try:
                async with lease.running():
                    await asyncio.Event().wait()
            except TimeoutError:
                assert lease.ended
                ended.append(version)

    readers = []
    for version in range(1, 7):
        store.publish(snapshot(version))
        readers.append(asyncio.ensure_future(read(version)))
        await asyncio.sleep(0)
    assert store.in_memory == [4, 5, 6]
    await asyncio.wait(readers[:3])
    assert ended == [1, 2, 3]
    for reader in readers[3:]:
        reader.cancel()
    await asyncio.wait(readers)
    assert store.in_memory == [6]


async def test_a_lease_ends_by_itself():
    store = WeightStore(kept_versions=1, lease_s=0.05)
    store.publish(snapshot(1))
    async with store.lease(1, None) as lease:
        with pytest.raises(TimeoutError):
            async with lease.running():
                await asyncio.Event().wait()
        assert lease.ended
