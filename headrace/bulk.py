"""Bytes of weights over plain TCP, beside the gRPC call that says what they are.

gRPC copies each byte several times on its way; here the kernel reads from the tensors and writes into them. Who may
fetch what is still said by GetWeights: it hands out a ticket, the receiver connects and sends it, and the parcels
follow one after the other, with nothing between. The socket calls run in threads, where they release the interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from headrace import address
from headrace.errors import AddressInUse
from headrace.shipment import Shipment
from headrace.v1 import trainer_service_pb2 as pb

log = logging.getLogger(__name__)

# One call to a thread moves about so much: calls are then rare, and the receiver's checks keep pace.
BATCH_BYTES = 8 * 1024 * 1024

_TICKET_BYTES = 16
_SILENCE_S = 60  # a connection on which nothing moves for so long has failed
_CLAIM_S = 20.0  # time to present a ticket
_CONNECT_S = 10.0
_MOST_TRANSFERS = 64  # at once; others wait
_MOST_UNCLAIMED = 256  # connections that have not shown a ticket; more are turned away, to come over gRPC instead
_ACCEPT_PAUSE_S = 1.0  # when the system gives no more sockets


class BulkServer:
    """A listening socket, and the tickets that it takes. For one event loop."""

    def __init__(self, listener: socket.socket):
        self._listener = listener
        self._claims: dict[bytes, asyncio.Future[socket.socket]] = {}
        self._threads = ThreadPoolExecutor(_MOST_TRANSFERS, thread_name_prefix="bulk")
        self._admitting: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.ensure_future(self._accept())

    @classmethod
    def start(cls, listen: str) -> BulkServer:
        """Listens on "host:port" (port 0: any).

        Raises:
            AddressInUse: the port is taken.
            StartupError: it is no address.
        """
        host, port = address.of_flag("--bulk-listen", listen)
        try:
            listener = socket.create_server((host or "0.0.0.0", port), backlog=1024)
        except OSError as error:
            raise AddressInUse(f"--bulk-listen {listen} cannot be bound: is the port taken? choose another") from error
        listener.setblocking(False)
        return cls(listener)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._listener.getsockname()[1]

    async def send(
        self,
        shipment: Shipment,
        first: int,
        *,
        announce: Callable[[pb.WeightTicket], Awaitable[object]],
        count: Callable[[int], None],
    ) -> None:
        """Sends the parcels from `first` on to whoever presents the ticket that it announces.

        Args:
            count: told the bytes that have gone.

        Raises:
            TimeoutError: nobody came.
            OSError: the connection failed, or nothing moved for a minute.
            ShipmentFailed: see Shipment.
        """
        ticket = secrets.token_bytes(_TICKET_BYTES)
        claim = self._claims[ticket] = asyncio.get_running_loop().create_future()
        try:
            await announce(pb.WeightTicket(port=self.port, ticket=ticket))
            async with asyncio.timeout(_CLAIM_S):
                connection = await claim
        except TimeoutError as error:
            raise TimeoutError(f"nobody brought the ticket to port {self.port} within {_CLAIM_S:.0f} s") from error
        finally:
            del self._claims[ticket]
        with connection:
            try:
                while first < len(shipment.manifest.tensors):
                    batch = await shipment.parcels(first, BATCH_BYTES)
                    await asyncio.get_running_loop().run_in_executor(self._threads, _send_all, connection, batch)
                    first += len(batch)
                    count(sum(map(len, batch)))
            finally:
                _shut(connection)  # wakes the thread when we are cancelled

    async def stop(self) -> None:
        """Closes the port; what is being sent goes on."""
        tasks = {self._accepting, *self._admitting}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._listener.close()
        self._threads.shutdown(wait=False)

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError as error:  # too many open files, or a caller who has left already
                log.warning("no bulk transfer can be taken in, weights come over gRPC: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._admitting) >= _MOST_UNCLAIMED:
                connection.close()
                continue
            task = asyncio.ensure_future(self._admit(connection))
            self._admitting.add(task)
            task.add_done_callback(self._admitting.discard)

    async def _admit(self, connection: socket.socket) -> None:
        """Hands a connection to the call whose ticket it brings; hangs up on any other."""
        loop, ticket, taken = asyncio.get_running_loop(), b"", False
        try:
            async with asyncio.timeout(_CLAIM_S):
                while len(ticket) < _TICKET_BYTES:
                    piece = await loop.sock_recv(connection, _TICKET_BYTES - len(ticket))
                    if not piece:
                        break
                    ticket += piece
            claim = self._claims.get(ticket)
            if claim is not None and not claim.done():
                _make_blocking(connection)
                claim.set_result(connection)
                taken = True
        except (OSError, TimeoutError):
            pass
        finally:
            if not taken:
                connection.close()


class BulkConnection:
    """The receiver's end of one ticket. To be closed."""

    def __init__(self, connection: socket.socket, thread: ThreadPoolExecutor):
        self._connection, self._thread = connection, thread

    @classmethod
    async def open(cls, host: str, ticket: pb.WeightTicket) -> BulkConnection:
        """Connects and presents the ticket. Raises OSError, which TimeoutError is, when that cannot be done."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="bulk")
        connecting = thread.submit(_connect, host, ticket)
        try:
            return cls(await asyncio.wrap_future(connecting), thread)
        except BaseException:
            connecting.add_done_callback(_close_connected)  # if it comes about nevertheless
            thread.shutdown(wait=False)
            raise

    async def read_into(self, buffers: Sequence[memoryview]) -> None:
        """Fills them in order. Raises OSError when the connection ends or nothing comes for a minute."""
        await asyncio.get_running_loop().run_in_executor(self._thread, _receive_all, self._connection, buffers)

    def close(self) -> None:
        """Hangs up; a read in progress ends."""
        _shut(self._connection)
        self._thread.submit(self._connection.close)
        self._thread.shutdown(wait=False)


def _connect(host: str, ticket: pb.WeightTicket) -> socket.socket:
    if not 0 < ticket.port < 2**16:
        raise ConnectionError(f"the ticket is for port {ticket.port}")
    connection = socket.create_connection((host, ticket.port), _CONNECT_S)
    try:
        connection.sendall(ticket.ticket)
        _make_blocking(connection)
    except OSError:
        connection.close()
        raise
    return connection


def _close_connected(connecting: Future[socket.socket]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


def _make_blocking(connection: socket.socket) -> None:
    """Lets the kernel, not Python, wait for the other side: whole tensors then move in one call."""
    connection.setblocking(True)
    limit = struct.pack("ll", _SILENCE_S, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send_all(connection: socket.socket, parcels: Sequence[memoryview]) -> None:
    for parcel in parcels:
        connection.sendall(parcel)


def _receive_all(connection: socket.socket, buffers: Sequence[memoryview]) -> None:
    for buffer in buffers:
        filled = 0
        while filled < len(buffer):
            count = connection.recv_into(buffer[filled:], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionError("the sender hung up")
            filled += count


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
