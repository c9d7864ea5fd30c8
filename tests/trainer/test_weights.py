"""services.trainer.weights: snapshots stay what they are; watchers get the newest."""

import asyncio

import ml_dtypes
import numpy as np

from headrace import weights
from services.trainer.weights import WeightStore, take_snapshot


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


def test_chunks_cover_every_byte_once():
    big = np.random.default_rng(0).random(1_500_001).astype(np.float32)
    taken = take_snapshot(1, [("small", np.zeros(3, np.float32)), ("big", big)])


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
