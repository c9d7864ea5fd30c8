"""headrace.bulk: a ticket is good for one connection, and a cut is noticed at both ends."""

import asyncio
import contextlib
import resource
import socket
from pathlib import Path

import numpy as np
import pytest

from headrace import weights
from headrace.bulk import BulkConnection, BulkServer
from headrace.errors import AddressInUse, StartupError
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


async def test_a_ticket_that_came_too_late_is_good_for_nothing():
    sent, _ = shipment([50])
    async with sending(sent) as (ticket, task, _), asyncio.timeout(DEADLINE_S):
        task.cancel()
        await asyncio.wait([task])
        late = await BulkConnection.open("127.0.0.1", ticket)
        with pytest.raises(OSError):
            await late.read_into([memoryview(bytearray(1))])
        late.close()


async def test_no_server_takes_anothers_ticket():
    ours, _ = shipment([50])
    theirs, _ = shipment([60])
    async with sending(ours) as (ticket, task, _), sending(theirs) as (other, _, _), asyncio.timeout(DEADLINE_S):
        stranger = await BulkConnection.open("127.0.0.1", pb.WeightTicket(port=other.port, ticket=ticket.ticket))
        with pytest.raises(OSError):
            await stranger.read_into([memoryview(bytearray(1))])
        stranger.close()
        assert not task.done()


async def test_a_cut_after_any_byte_is_noticed_at_both_ends():
    sent, arrays = shipment([1, 2])
    whole = b"".join(array.tobytes() for array in arrays)
    for cut in range(len(whole)):
        got = bytearray(len(whole))
        async with (
            asyncio.timeout(DEADLINE_S),
            sending(sent) as (ticket, _, _),
            await asyncio.start_server(_cutter(ticket.port, cut), "127.0.0.1", 0) as between,
        ):
            port = between.sockets[0].getsockname()[1]
            connection = await BulkConnection.open("127.0.0.1", pb.WeightTicket(port=port, ticket=ticket.ticket))
            with pytest.raises(OSError):
                await connection.read_into([memoryview(got)])
            connection.close()
        assert got[:cut] == whole[:cut]


def _cutter(port, cut):
    """Passes a ticket on to the port, and so many bytes back."""

    async def between(reader, writer):
        there, to = await asyncio.open_connection("127.0.0.1", port)
        to.write(await reader.readexactly(16))
        writer.write(await there.readexactly(cut))
        await writer.drain()
        for end in (writer, to):
            end.close()

    return between


async def test_callers_without_a_ticket_keep_nobody_out():
    sent, _ = shipment([50])
    async with sending(sent) as (ticket, task, _), contextlib.AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S):
        silent = []
        for _ in range(300):
            reader, writer = await asyncio.open_connection("127.0.0.1", ticket.port)
            stack.callback(writer.close)
            silent.append(reader)
        # Some were turned away at once; the transfer gets its place when another has left.
        await asyncio.wait([asyncio.ensure_future(reader.read()) for reader in silent], return_when="FIRST_COMPLETED")
        await stack.aclose()
        while True:
            connection = await BulkConnection.open("127.0.0.1", ticket)
            with contextlib.suppress(OSError):
                await connection.read_into([memoryview(bytearray(200))])
                break
            connection.close()
        await task
        connection.close()


async def test_the_server_goes_on_when_the_system_had_no_more_sockets():
    sent, arrays = shipment([50])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with sending(sent) as (ticket, task, _), asyncio.timeout(DEADLINE_S):
        connection = socket.socket()
        connection.setblocking(False)
        resource.setrlimit(resource.RLIMIT_NOFILE, (connection.fileno() + 1, limits[1]))
        try:
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", ticket.port))
            await asyncio.sleep(0.1)  # it tries to accept, and cannot
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        connection.close()
        late = await BulkConnection.open("127.0.0.1", ticket)
        received = np.empty_like(arrays[0])
        await late.read_into([received.data])
        await task
        late.close()


async def test_a_slow_reader_delays_nobody():
    slow, _ = shipment([20_000_000])
    async with sending(slow) as (ticket, task, _), asyncio.timeout(DEADLINE_S):
        loris = await BulkConnection.open("127.0.0.1", ticket)
        await loris.read_into([memoryview(bytearray(1))])
        quick, _ = shipment([1000])
        async with sending(quick) as (other, done, _):
            connection = await BulkConnection.open("127.0.0.1", other)
            await connection.read_into([memoryview(bytearray(4000))])
            await done
            connection.close()
        assert not task.done()
        loris.close()


async def test_many_readers_cost_no_copy_each():
    sent, arrays = shipment([16_000_000])
    server, scratch = BulkServer.start("127.0.0.1:0"), memoryview(bytearray(100_000))
    tickets = asyncio.Queue()
    before = resident_bytes()
    sends = [
        asyncio.ensure_future(server.send(sent, 0, announce=tickets.put, count=lambda size_bytes: None))
        for _ in range(16)
    ]
    connections = []
    async with asyncio.timeout(DEADLINE_S):
        for _ in sends:
            connections.append(await BulkConnection.open("127.0.0.1", await tickets.get()))
            await connections[-1].read_into([scratch])
        assert resident_bytes() - before < arrays[0].nbytes  # of 16 times as much that is on its way
        for connection in connections:
            connection.close()
        await asyncio.wait(sends)
    assert all(isinstance(send.exception(), OSError) for send in sends)
    await server.stop()


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


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


async def test_a_place_where_it_cannot_listen_is_told():
    with pytest.raises(StartupError, match=r"--bulk-listen 'nowhere' is no HOST:PORT"):
        BulkServer.start("nowhere")
    server = BulkServer.start("127.0.0.1:0")
    with pytest.raises(AddressInUse, match=rf"--bulk-listen 127.0.0.1:{server.port} cannot be bound"):
        BulkServer.start(f"127.0.0.1:{server.port}")
    await server.stop()
