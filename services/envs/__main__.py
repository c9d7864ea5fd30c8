"""The environment server's process: `python -m services.envs`.

Serves one environment: any class (`my_module:MyEnvironment`), for which it reads no file and needs nothing of the
project but its gRPC records, or that of a run's config (`--config RUN.yaml --environment KEY`). SIGTERM refuses new
episodes, lets running ones end, and closes what is left after --drain-timeout-s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import socket
from dataclasses import dataclass, field
from typing import Any

from headrace import rpc, security, security_arguments, telemetry, tracing
from headrace.errors import StartupError
from headrace.v1 import environment_service_pb2_grpc
from services.envs import catalog
from services.envs.server import SERVICE, EnvironmentServer

log = logging.getLogger("services.envs")


@dataclass(frozen=True)
class Served:
    """What this process serves."""

    name: str
    implementation: str
    options: dict[str, Any]
    capacity: int
    logging: dict[str, Any] = field(default_factory=dict)
    tracing: dict[str, Any] = field(default_factory=dict)
    security: security.Security = security.PLAIN


async def serve(arguments: argparse.Namespace) -> None:
    """Serves until a stop signal. Raises StartupError."""
    served = _from_config(arguments) if arguments.config else _from_arguments(arguments)
    telemetry.configure("envs", **served.logging)
    if served.tracing:
        tracing.configure("environment", instance=f"{served.name}-{socket.gethostname()}", **served.tracing)
    environments = {served.name: catalog.find(served.implementation, served.options)}
    servicer = EnvironmentServer(environments, capacity=served.capacity, step_timeout_s=arguments.step_timeout_s)
    stop = rpc.stop_signal()
    add = environment_service_pb2_grpc.add_EnvironmentServiceServicer_to_server
    server = await rpc.Server.start(
        arguments.listen, [(SERVICE, add, servicer)], security=served.security, health_listen=arguments.health_listen
    )
    try:
        if arguments.metrics_listen:
            telemetry.serve_metrics(arguments.metrics_listen)
        async with contextlib.AsyncExitStack() as stack:
            if not await _set_up(stack, servicer, stop):
                return
            await server.set_serving(True)
            log.info("serving %s (%s) on port %d", served.name, served.implementation, server.port)
            await stop.wait()
            log.info("draining for at most %g s", arguments.drain_timeout_s)
            await server.stop(arguments.drain_timeout_s)
    finally:
        await server.stop(0)


async def _set_up(stack: contextlib.AsyncExitStack, servicer: EnvironmentServer, stop: asyncio.Event) -> bool:
    """Lets the environment set up, to be closed with the stack; False: told to stop meanwhile. Raises StartupError."""
    limit = asyncio.timeout(None)

    async def cut_short() -> None:
        await stop.wait()
        limit.reschedule(0)

    cutter = asyncio.create_task(cut_short())
    try:
        # In this task, not in one that could be cancelled: what a setup enters must be left by the same task.
        async with limit:
            await stack.enter_async_context(servicer)
            cutter.cancel()
    except Exception as error:
        if stop.is_set():
            return False
        log.exception("the environment cannot be set up")
        line = " ".join(f"the environment's setup raised {type(error).__name__}: {error}".split())
        raise StartupError(line) from error
    return True


def _from_config(arguments: argparse.Namespace) -> Served:
    # Only here, so that a server of a class needs no config library.
    from headrace import config as config_file

    config = config_file.load(arguments.config)
    key = arguments.environment
    if key not in config.environments:
        raise StartupError(
            f"{arguments.config}: no environment {key!r}: --environment names {sorted(config.environments)}"
        )
    section = config.environments[key]
    if not section.implementation:
        raise StartupError(f"{arguments.config}: environments.{key} has an address and no class: nothing to serve here")
    return Served(
        name=key,
        implementation=section.implementation,
        options=section.options,
        capacity=arguments.capacity or section.max_concurrent_episodes,
        logging={"level": config.telemetry.log_level, "log_format": config.telemetry.log_format},
        tracing={"run_id": config.run.id, **config.telemetry.traces.model_dump()},
        security=security.read(config.security.tls, section.token_file),
    )


def _from_arguments(arguments: argparse.Namespace) -> Served:
    try:
        options = json.loads(arguments.options)
    except ValueError as error:
        raise StartupError(f"--options is not JSON ({error}): give an object such as '{{\"turns\": 4}}'") from error
    if not isinstance(options, dict):
        raise StartupError("--options must be a JSON object, the keyword arguments of the class")
    for setting in arguments.set:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise StartupError(f"--set {setting}: write KEY=VALUE, for example --set turns=4")
        options[key] = _json_or_text(value)
    name = arguments.environment or arguments.implementation.rpartition(":")[2]
    return Served(
        name,
        arguments.implementation,
        options,
        arguments.capacity or 1024,
        security=security_arguments.read(arguments, serves=True),
    )


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m services.envs",
        description="Serves an environment to rollout gateways over gRPC; one stream is one episode.",
        epilog=f"Environments that come with the project: {', '.join(sorted(catalog.CATALOG))}.",
    )
    parser.add_argument("implementation", metavar="CLASS", nargs="?", help="module:Class, or a name of ours")
    parser.add_argument("--config", metavar="RUN.yaml", help="a run's config in place of CLASS, with --environment")
    parser.add_argument("--environment", metavar="KEY", help="the name that tasks carry (the class's own name)")
    parser.add_argument("--options", metavar="JSON", default="{}", help="keyword arguments of CLASS, an object")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="one of them: JSON or text; may be repeated"
    )
    parser.add_argument("--capacity", metavar="N", type=int, help="episodes at once (config's value, else 1024)")
    parser.add_argument("--listen", metavar="HOST:PORT", default="0.0.0.0:50051", help="gRPC (%(default)s)")
    parser.add_argument("--health-listen", default="", metavar="HOST:PORT", help=rpc.HEALTH_LISTEN_HELP)
    parser.add_argument("--metrics-listen", metavar="HOST:PORT", help="Prometheus /metrics (none)")
    parser.add_argument("--step-timeout-s", metavar="S", type=float, help="for a reset or a step (the class's own)")
    parser.add_argument(
        "--drain-timeout-s", metavar="S", type=float, default=20.0, help="for running episodes at the end (%(default)s)"
    )
    security_arguments.add(parser, serves=True)
    arguments = parser.parse_args()
    if bool(arguments.config) == bool(arguments.implementation):
        parser.error("name either a CLASS, such as my_module:MyEnvironment, or --config RUN.yaml")
    if arguments.config and not arguments.environment:
        parser.error("--config needs --environment KEY")
    if arguments.config and security_arguments.given(arguments):
        parser.error(f"--config tells of security: leave {', '.join(security_arguments.given(arguments))} out")
    if arguments.capacity is not None and arguments.capacity < 1:
        parser.error("--capacity must be at least 1")
    if arguments.step_timeout_s is not None and arguments.step_timeout_s <= 0:
        parser.error("--step-timeout-s must be above 0")
    return arguments


if __name__ == "__main__":
    parsed = _parse()
    rpc.main(lambda: serve(parsed))
