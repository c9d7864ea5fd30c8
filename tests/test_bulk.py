"""headrace.bulk: a ticket is good for one connection, and a cut is noticed at both ends."""

import asyncio
import contextlib

import numpy as np
import pytest

from headrace import weights
from headrace.bulk import BulkConnection, BulkServer
from headrace.shipment import Shipment, ShipmentFailed
from headrace.v1 import trainer_service_pb2 as pb

DEADLINE_S = 60


def shipment(sizes, arrived=None):
    arrays = [np.random.default_rng(n).integers(0, 256, 4 * size, dtype=np.uint8) for n, size in enumerate(sizes)]
    infos = [weights.tensor_info(f"t{n}", array.view(np.float32)) for n, array in enumerate(arrays)]
    parcels = [memoryview(array) for array in arrays]
    return Shipment(pb.WeightManifest(tensors=infos), parcels[:arrived]), arrays


@contextlib.asynccontextmanager
async def sending(sent, first=0):
    """A server that sends, the ticket, and the task."""
    server, ticket = BulkServer.start("127.0.0.1:0"), asyncio.get_running_loop().create_future()

    async def announce(offered):
        ticket.set_result(offered)

    counted = []
    task = asyncio.ensure_future(server.send(sent, first, announce=announce, count=counted.append))
    try:
        yield await ticket, task, counted
    finally:
        task.cancel()
        await asyncio.wait([task])
        await server.stop()


@pytest.mark.parametrize("first", [0, 2])
async def test_everything_arrives_from_the_tensor_that_was_asked_for(first):
    sent, arrays = shipment([3, 0, 5_000_001, 1, 2_500_000, 7])
    async with sending(sent, first) as (ticket, task, counted), asyncio.timeout(DEADLINE_S):
        connection = await BulkConnection.open("127.0.0.1", ticket)
        received = [np.empty_like(array) for array in arrays[first:]]
        await connection.read_into([buffer.data for buffer in received])
        await task
        connection.close()
        assert sum(counted) == sent.size_from(first)
    for got, array in zip(received, arrays[first:], strict=True):
        np.testing.assert_array_equal(got, array)


async def test_a_ticket_is_good_once_and_a_wrong_one_never():
    sent, _ = shipment([50])
    async with sending(sent) as (ticket, _, _), asyncio.timeout(DEADLINE_S):
        wrong = await BulkConnection.open("127.0.0.1", pb.WeightTicket(port=ticket.port, ticket=bytes(16)))
        with pytest.raises(OSError):
            await wrong.read_into([memoryview(bytearray(1))])
        right = await BulkConnection.open("127.0.0.1", ticket)
        await right.read_into([memoryview(bytearray(200))])
        again = await BulkConnection.open("127.0.0.1", ticket)
        with pytest.raises(OSError):
            await again.read_into([memoryview(bytearray(1))])
        for connection in (wrong, right, again):
            connection.close()


async def test_a_shipment_that_fails_cuts_the_connection():
    sent, arrays = shipment([1000, 1000], arrived=1)
    async with sending(sent) as (ticket, task, _), asyncio.timeout(DEADLINE_S):
        connection = await BulkConnection.open("127.0.0.1", ticket)
        first = np.empty_like(arrays[0])
        await connection.read_into([first.data])
        np.testing.assert_array_equal(first, arrays[0])
        sent.fail()
        with pytest.raises(OSError):
            await connection.read_into([memoryview(bytearray(4000))])
        with pytest.raises(ShipmentFailed):
            await task
        connection.close()


async def test_a_receiver_who_leaves_ends_the_transfer():
    sent, _ = shipment([20_000_000])
    async with sending(sent) as (ticket, task, _), asyncio.timeout(DEADLINE_S):
        connection = await BulkConnection.open("127.0.0.1", ticket)
        await connection.read_into([memoryview(bytearray(1000))])
        connection.close()
        with pytest.raises(OSError):
            await task


async def test_a_transfer_that_is_cancelled_hangs_up_though_its_receiver_reads_nothing():
    sent, _ = shipment([20_000_000])
    async with sending(sent) as (ticket, task, _), asyncio.timeout(DEADLINE_S):
        connection = await BulkConnection.open("127.0.0.1", ticket)
        await connection.read_into([memoryview(bytearray(1000))])
        task.cancel()
        await asyncio.wait([task])
        with pytest.raises(OSError):
            await connection.read_into([memoryview(bytearray(80_000_000))])
        connection.close()
