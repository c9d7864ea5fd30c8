"""An engine of several hosts: one program over all their chips, which therefore must take the same steps everywhere.

The first host (rank 0) serves HTTP, pulls weights and decides. Before each step its scheduler sends what it has taken
from the mailbox, mostly nothing, to every other host, whose scheduler blocks until that has come, carries it out and
computes the same step: schedulers are deterministic, and a swap is a command like any other, so it happens at the same
step on all. The tensors of a version travel ahead of its swap, on a connection of their own, while the engine serves;
to lay them out on the devices is part of the swap, for it is a program of all hosts too, whose place among the steps
must be the same on each.

Each follower opens two connections to the port above the coordinator's: "steps" and "weights". Messages are JSON behind
a length; tensors follow theirs as bytes. When a host ends, so does the engine: whoever started the hosts starts all of
them again. A follower that is told to stop (SIGTERM) tells the first host, which drains and then ends all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orjson

from headrace import weights
from headrace.errors import StartupError
from services.inference.hosts import Hosts
from services.inference.mailbox import Abort, Finished, Generate, Mailbox, Stopped, Swap
from services.inference.request import Request

log = logging.getLogger(__name__)

_JOIN_S = 600.0  # for all hosts to come up
_RETRY_S = 0.5
_STOP, _LEAVING, _STAGED = b"stop", b"leaving", b"staged"
_LENGTH = struct.Struct("!Q")
_COMMANDS: dict[str, Any] = {"generate": Generate, "abort": Abort, "swap": Swap}


class Leader:
    """Rank 0's source of commands: the mailbox, told to all followers."""

    def __init__(self, mailbox: Mailbox, hosts: Hosts, *, left: Callable[[str], None], leaving: Callable[[], None]):
        """Waits for every follower.

        Args:
            mailbox: where commands come from.
            hosts: the hosts of this engine.
            left: called, from any thread, with the reason when a follower has gone.
            leaving: called, from any thread, when a follower wants the engine to drain.
        """
        self.seed = mailbox.seed
        self._mailbox = mailbox
        self._connections = _accept(hosts, hello={"seed": self.seed})
        self._left, self._leaving = left, leaving
        self._stopping = False
        self._sending = threading.Lock()
        for (rank, purpose), connection in self._connections.items():
            if purpose == "steps":
                threading.Thread(target=self._watch, args=(rank, connection), name=f"host {rank}", daemon=True).start()

    def take(self) -> list[Any]:
        """What the mailbox holds, after every follower has been told."""
        items = self._mailbox.take()
        self._tell(orjson.dumps([encode(item) for item in items]))
        return items

    def wait(self, timeout_s: float) -> None:
        """As the mailbox."""
        self._mailbox.wait(timeout_s)

    def deliver(self, finished: list[Finished]) -> None:
        """As the mailbox."""
        self._mailbox.deliver(finished)

    def send_stock(self, result: Any) -> None:
        """As the mailbox."""
        self._mailbox.send_stock(result)

    def send_version(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        """Gives every follower a version's tensors; returns when all have them."""
        heads = [(name, int(weights.tensor_type(tensor.dtype)), tensor.shape) for name, tensor in tensors.items()]
        followers = [connection for (_, purpose), connection in self._connections.items() if purpose == "weights"]
        for connection in followers:
            _send(connection, orjson.dumps({"version": version, "tensors": heads}))
            for tensor in tensors.values():
                connection.sendall(weights.tensor_bytes(tensor))
        for connection in followers:
            _receive(connection)

    def stop(self) -> None:
        """Ends the followers that are there."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._tell(_STOP)

    def _tell(self, message: bytes) -> None:
        with self._sending:
            for (_, purpose), connection in self._connections.items():
                if purpose == "steps":
                    _send(connection, message)

    def _watch(self, rank: int, connection: socket.socket) -> None:
        try:
            _receive(connection)
        except OSError as error:
            if not self._stopping:
                self._left(f"host {rank} of this engine has gone: {error}")
        else:
            log.info("host %d is told to stop: draining", rank)
            self._leaving()


class Follower:
    """Another rank's source of commands: what the first host sends."""

    def __init__(self, hosts: Hosts):
        """Joins the first host. Raises StartupError when that does not answer in time."""
        self._steps, hello = _join(hosts, "steps")
        self._weights, _ = _join(hosts, "weights")
        self.seed: int = hello["seed"]

    def take(self) -> list[Any]:
        """What the first host carries out before its next step.

        Raises:
            Stopped: the first host has ended the engine.
            OSError: it has gone.
        """
        message = _receive(self._steps)
        if message == _STOP:
            raise Stopped
        return [decode(item) for item in orjson.loads(message)]

    def wait(self, timeout_s: float) -> None:
        """Returns at once: `take` waits."""

    def deliver(self, finished: list[Finished]) -> None:
        """Drops them: the first host answers."""

    def send_stock(self, result: Any) -> None:
        """Drops it: the first host answers."""

    def leave(self) -> None:
        """Asks the first host to drain and to end the engine."""
        _send(self._steps, _LEAVING)

    def receive_versions(self, stage: Callable[[int, Mapping[str, np.ndarray]], None]) -> None:
        """Hands each version that comes to `stage`, in a thread of its own, until the engine ends."""
        threading.Thread(target=self._receive_versions, args=(stage,), name="weights", daemon=True).start()

    def _receive_versions(self, stage: Callable[[int, Mapping[str, np.ndarray]], None]) -> None:
        while True:
            try:
                head = orjson.loads(_receive(self._weights))
                tensors = {}
                for name, number, shape in head["tensors"]:
                    tensors[name] = tensor = np.empty(shape, weights.tensor_dtype(number))
                    _fill(self._weights, memoryview(tensor.reshape(-1).view(np.uint8)))
                stage(head["version"], tensors)
                _send(self._weights, _STAGED)
            except OSError:
                return


def encode(item: Any) -> list[Any]:
    """A command as JSON. Raises ValueError for what only the stock API sends."""
    for name, kind in _COMMANDS.items():
        if isinstance(item, kind):
            return [name, dataclasses.asdict(item)]
    raise ValueError(f"an engine of several hosts has no stock API, but {type(item).__name__} came")


def decode(item: list[Any]) -> Any:
    """The command that `encode` made this of."""
    name, values = item
    if name == "generate":
        return Generate(values["rid"], Request(**values["request"]))
    return _COMMANDS[name](**values)


def _accept(hosts: Hosts, hello: Mapping[str, Any]) -> dict[tuple[int, str], socket.socket]:
    """Two connections of each follower."""
    _, port = hosts.control
    connections: dict[tuple[int, str], socket.socket] = {}
    deadline_s = time.monotonic() + _JOIN_S
    with socket.create_server(("", port), backlog=64) as listener:
        while len(connections) < 2 * (hosts.nodes - 1):
            listener.settimeout(max(0.1, deadline_s - time.monotonic()))
            try:
                connection, _ = listener.accept()
                connection.settimeout(None)
            except TimeoutError as error:
                raise StartupError(f"only {len(connections) // 2 + 1} of {hosts.nodes} hosts have come") from error
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            joined = orjson.loads(_receive(connection))
            connections[joined["rank"], joined["purpose"]] = connection
            _send(connection, orjson.dumps(hello))
    return connections


def _join(hosts: Hosts, purpose: str) -> tuple[socket.socket, dict[str, Any]]:
    """A connection to the first host, and what it said."""
    deadline_s = time.monotonic() + _JOIN_S
    while True:
        try:
            connection = socket.create_connection(hosts.control, timeout=10)
            break
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise StartupError(f"the first host, {hosts.coordinator}, does not answer: {error}") from error
            time.sleep(_RETRY_S)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _send(connection, orjson.dumps({"rank": hosts.rank, "purpose": purpose}))
    return connection, orjson.loads(_receive(connection))


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)) + message)


def _receive(connection: socket.socket) -> bytes:
    """One message. Raises OSError when the other side has gone."""
    head = bytearray(_LENGTH.size)
    _fill(connection, memoryview(head))
    message = bytearray(_LENGTH.unpack(head)[0])
    _fill(connection, memoryview(message))
    return bytes(message)


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the connection was closed")
        view = view[count:]
