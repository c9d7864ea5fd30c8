"""gRPC as every service uses it: servers with health, reflection and a graceful stop; channels that notice the dead.

A service's `__main__` calls `main(run)`. `run` starts a Server, marks it serving when it is ready, waits for
`stop_signal()`, drains and stops. What a user got wrong ends the process with one line and exit code 2.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from headrace import address, tracing
from headrace import security as securities
from headrace.errors import AddressInUse, StartupError
from headrace.security import PLAIN, Security

log = logging.getLogger(__name__)

HEALTH_LISTEN_HELP = "gRPC health alone, in plaintext, for probes that know no TLS (none)"
MESSAGE_LIMIT_BYTES = 512 * 1024 * 1024

_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_LIMITS = [
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
]
_SERVER_OPTIONS = [
    *_KEEPALIVE,
    *_LIMITS,
    # A second server on a taken port must fail, not share it.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", 100_000),
    # A burst of episodes that start at once is normal here; the defaults refuse about the thousandth.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
]
# What a server with gRPC's default settings allows: one that is asked more often than every five minutes during a long
# call, or at all without one, drops the connection and every call on it.
_SELDOM = [("grpc.keepalive_time_ms", 330_000), ("grpc.keepalive_timeout_ms", 20_000)]
_CHANNEL_OPTIONS = [
    *_LIMITS,
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


class Service(NamedTuple):
    """One gRPC service of a server: its full name, the generated `add_…_to_server`, and what answers."""

    name: str
    add: Callable[[Any, Any], None]
    servicer: Any


class Server:
    """A running gRPC server."""

    def __init__(self, servers: Sequence[grpc.aio.Server], port: int, health: HealthServicer, names: Sequence[str]):
        self.port = port
        self._servers = servers
        self._health = health
        self._names = names

    @classmethod
    async def start(
        cls,
        listen: str,
        services: Sequence[Service | tuple[str, Callable[..., None], Any]],
        *,
        security: Security = PLAIN,
        health_listen: str = "",
    ) -> Server:
        """Listens on "host:port" (port 0: any) and answers NOT_SERVING to health checks until `set_serving`.

        The health service named "liveness" is SERVING from the start until `stop`. Health checks need no token.

        Args:
            listen: where to serve.
            services: what to serve.
            security: what to show and to ask of callers.
            health_listen: "host:port" that answers health checks alone, in plaintext: Kubernetes' probes know no TLS.

        Raises:
            AddressInUse: the port is taken.
            StartupError: it is no address.
        """
        checks = [_TokenCheck(security)] if security.tokens else []
        server = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=checks)
        health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        names = [Service(*service).name for service in services]
        for service in services:
            _, add, servicer = service
            add(servicer, server)
        described = [*names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(described, server)
        servers = [server]
        port = _bind(server, listen, "--listen", security.server_credentials())
        if health_listen:
            probed = grpc.aio.server(options=_SERVER_OPTIONS)
            health_pb2_grpc.add_HealthServicer_to_server(health, probed)
            _bind(probed, health_listen, "--health-listen", None)
            servers.append(probed)
        self = cls(servers, port, health, ["", *names])
        await self.set_serving(False)
        # Whether the process answers at all, ready or not: a liveness probe must not end a service that waits.
        await health.set("liveness", health_pb2.HealthCheckResponse.SERVING)
        for each in servers:
            await each.start()
        return self

    async def set_serving(self, serving: bool) -> None:
        """What health checks hear, for the server and for each of its services."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets running ones end within `grace_s` seconds, then cancels them."""
        await self._health.enter_graceful_shutdown()
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self._servers[0].wait_for_termination()


def channel(address: str, *, foreign: bool = False, security: Security = PLAIN, name: str = "") -> grpc.aio.Channel:
    """A channel to "host:port"; calls go round the hosts that the name resolves to.

    Args:
        address: the host:port, or a gRPC target.
        foreign: the server may be anybody's, not a Server of this module; then deadlines must find out who is dead.
        security: what to ask of the server and to show it.
        name: the host that its certificate is for, where that is not the address's.
    """
    target = address if "://" in address or address.startswith("unix:") else f"dns:///{address}"
    keepalive = _SELDOM if foreign else _KEEPALIVE
    options = [*keepalive, *_CHANNEL_OPTIONS]
    credentials = security.channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    if name:
        options.append(("grpc.ssl_target_name_override", name))
    return grpc.aio.secure_channel(target, credentials, options=options)


async def explain_failures(channel: grpc.aio.Channel, address: str, security: Security) -> None:
    """Logs why no connection to a server that is there comes about, once for each reason, until it is cancelled.

    Calls that wait for their server to start would otherwise wait for one that they cannot talk to, and say nothing.
    """
    told = ""
    while True:
        state = channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            problem = await securities.diagnose(address, security)
            if problem and problem != told:
                log.error("%s", problem)
            told = problem or told
        elif state is grpc.ChannelConnectivity.READY:
            told = ""
        await channel.wait_for_state_change(state)


def stop_signal(*others: signal.Signals) -> asyncio.Event:
    """An event that SIGTERM, SIGINT or one of `others` sets."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, *others):
        loop.add_signal_handler(number, event.set)
    return event


def main(run: Callable[[], Coroutine[Any, Any, int | None]]) -> None:
    """Runs a service to its end and exits: 0, what `run` returns, or 2 with a line for what a user got wrong."""
    try:
        code = asyncio.run(run()) or 0
    except StartupError as error:
        _complain(error)
        code = 2
    except BaseExceptionGroup as group:
        known, rest = group.split(StartupError)
        if known is None or rest is not None:
            raise
        for leaf in _leaves(known):
            _complain(leaf)
        code = 2
    finally:
        tracing.stop()
    sys.exit(code)


def _bind(server: grpc.aio.Server, listen: str, flag: str, credentials: grpc.ServerCredentials | None) -> int:
    """Opens the port. Raises AddressInUse and StartupError."""
    _refuse_taken(listen, flag)
    try:
        if credentials is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, credentials)
    except RuntimeError as error:  # taken since we looked
        raise AddressInUse(f"{flag} {listen} cannot be bound: is the port taken? choose another") from error


class _TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without the right token, but for health checks."""

    def __init__(self, security: Security):
        self._security = security

    async def intercept_service(self, continuation: Callable[..., Any], call: grpc.HandlerCallDetails) -> Any:
        metadata = dict(call.invocation_metadata or ())
        refusal = self._security.refusal(metadata.get("authorization"))
        if not refusal or call.method.startswith("/grpc.health.v1.Health/"):
            return await continuation(call)

        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)

        return grpc.stream_stream_rpc_method_handler(refuse)


def _refuse_taken(listen: str, flag: str) -> None:
    """Raises AddressInUse with the system's reason; gRPC would log lines of its own and keep the reason there."""
    host, port = address.of_flag(flag, listen)
    refused: list[OSError] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        found, refused = [], [error]
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            refused.append(error)
    # A name may stand for an address of a family that this machine does not have.
    if any(error.errno == errno.EADDRINUSE for error in refused) or len(refused) >= max(1, len(found)):
        reason = refused[0].strerror or str(refused[0])
        raise AddressInUse(f"{flag} {listen} cannot be bound ({reason}); give a free HOST:PORT of this machine")


def _complain(error: BaseException) -> None:
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return leaves


__all__ = ["AddressInUse", "Server", "Service", "StartupError", "channel", "explain_failures", "main", "stop_signal"]
