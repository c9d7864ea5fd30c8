"""services.inference.shelf: what becomes of those who read a version while it is still coming."""

import asyncio

import pytest

from headrace.shipment import ShipmentFailed
from headrace.v1 import trainer_service_pb2 as pb
from services.inference.shelf import Shelf, without_base

TENSORS = [pb.TensorInfo(name=name, type=pb.TENSOR_TYPE_FLOAT32, shape=[2]) for name in "ab"]
DIFFERENCE = pb.WeightManifest(
    policy_version=2,
    base_policy_version=1,
    tensors=TENSORS,
    root_hash="root",
    parcels=[pb.TensorParcel(encoding=pb.TENSOR_ENCODING_DELTA, size_bytes=3)] * 2,
)


async def test_who_reads_a_difference_reads_on_when_another_sender_goes_on_with_it():
    shelf = Shelf()
    full, difference = shelf.receive(DIFFERENCE)
    full.add(memoryview(bytes(8)))
    difference.add(memoryview(b"abc"))
    async with shelf.lease(2, 1) as lease:
        assert lease.shipment is difference
        reading = asyncio.ensure_future(difference.parcels(1, 0))
        await asyncio.sleep(0)
        assert shelf.receive(DIFFERENCE) == (full, difference)
        difference.add(memoryview(b"def"))
        assert await reading == [b"def"]


async def test_who_reads_a_difference_is_told_when_all_of_it_comes_instead():
    shelf = Shelf()
    full, difference = shelf.receive(DIFFERENCE)
    reading = asyncio.ensure_future(difference.parcels(0, 0))
    await asyncio.sleep(0)
    assert shelf.receive(without_base(DIFFERENCE)) == (full, None)
    with pytest.raises(ShipmentFailed):
        await reading
    async with shelf.lease(2, 1) as lease:
        assert lease.shipment is full
