"""Starts one rollout gateway: wiring only. SIGTERM drains it.

It waits for Redis as long as redis.timeout_s; engines, environments and the trainer may come later.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import resource
import time
from typing import Any

from redis.exceptions import RedisError

from headrace import config, model_folder, rpc, security, telemetry, tracing
from headrace.errors import StartupError
from headrace.stream import Streams, connect, remedy
from headrace.v1 import rollout_service_pb2_grpc
from services.rollout import metrics
from services.rollout.circuit import CircuitLimits
from services.rollout.environment import Environment
from services.rollout.episode import World
from services.rollout.inference import Engines
from services.rollout.openai_api import OpenAiServer
from services.rollout.renderer import Renderer
from services.rollout.scheduler import Scheduler
from services.rollout.server import SERVICE_NAME, RolloutServicer
from services.rollout.sessions import Agents
from services.rollout.sglang import Sglang
from services.rollout.slots import Slots
from services.rollout.vllm import Vllm
from services.rollout.window import WindowLimits

log = logging.getLogger("services.rollout")


async def run(arguments: argparse.Namespace) -> None:
    """Serves until a signal."""
    settings = config.load(arguments.config)
    telemetry.configure(arguments.name, level=settings.telemetry.log_level, log_format=settings.telemetry.log_format)
    _check(settings, arguments)
    tracing.configure(
        "gateway", instance=arguments.name, run_id=settings.run.id, **settings.telemetry.traces.model_dump()
    )
    _raise_file_limit()
    secured = security.read(settings.security.tls, settings.security.token_file)
    stop = rpc.stop_signal()
    folder = model_folder.ensure(settings)
    renderer = Renderer.open(folder)
    vocabulary_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    async with contextlib.AsyncExitStack() as stack:
        redis = _connect(settings.redis)
        stack.push_async_callback(redis.aclose)
        streams = Streams(redis, settings.run.id, claim_timeout_s=settings.rollout.claim_timeout_s)
        telemetry.serve_metrics(arguments.metrics_listen)
        engines = await stack.enter_async_context(_engines(settings, vocabulary_size, secured))
        served = {
            name: Environment(name, entry, _caller(secured, entry))
            for name, entry in settings.environments.items()
            if entry.driver == "gateway"
        }
        for environment in served.values():
            stack.push_async_callback(environment.close)
        driven = {
            name: Agents(name, entry, renderer, thinking=settings.rollout.thinking)
            for name, entry in settings.environments.items()
            if entry.driver == "external"
        }
        world = World(settings.rollout, renderer, engines, {**served, **driven})
        slots = Slots(settings.rollout.max_concurrent_episodes)
        scheduler = Scheduler(
            streams,
            world,
            slots,
            gateway=arguments.name,
            run_id=settings.run.id,
            claim_timeout_s=settings.rollout.claim_timeout_s,
        )
        servicer = RolloutServicer(scheduler, world, slots, gateway=arguments.name)
        server = await rpc.Server.start(
            arguments.listen,
            [rpc.Service(SERVICE_NAME, rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server, servicer)],
            security=secured,
            health_listen=arguments.health_listen,
        )
        stack.push_async_callback(server.stop, 1.0)
        if arguments.openai_listen:
            agents = OpenAiServer(world, slots, security=secured, draining=lambda: scheduler.draining)
            await agents.start(arguments.openai_listen)
            stack.push_async_callback(agents.stop)
            log.info("agents are served on port %d", agents.port)
        await _open(streams, settings.redis)
        log.info("gateway %s of run %s listens on port %d", arguments.name, settings.run.id, server.port)
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(metrics.watch_event_loop())
            work = tasks.create_task(scheduler.run())
            explaining = [tasks.create_task(environment.explain_failures()) for environment in served.values()]
            await server.set_serving(True)
            _collect_seldom()
            await stop.wait()
            log.info("draining")
            await server.set_serving(False)
            await scheduler.drain(settings.rollout.drain_timeout_s)
            await work
            for task in (watch, *explaining):
                task.cancel()
        log.info("stopped")


def _engines(settings: config.Config, vocabulary_size: int, secured: security.Security) -> Engines:
    rollout = settings.rollout
    return Engines(
        settings.inference.addresses,
        timeout_s=rollout.engine_timeout_s,
        attempts=rollout.engine_attempts,
        vocabulary_size=vocabulary_size,
        dialect=Vllm(settings.run.id) if settings.inference.dialect == "vllm" else Sglang(),
        affinity=rollout.group_size if settings.inference.prefix_cache else 0,
        window=WindowLimits(rollout.engine_window_least, rollout.engine_window_first, rollout.engine_window_most),
        circuit=CircuitLimits(rollout.engine_circuit_failures, longest_s=rollout.engine_circuit_longest_s),
        security=secured,
    )


def _caller(secured: security.Security, environment: config.Environment) -> security.Security:
    """How to call an environment: with its own token, not with ours."""
    tls = secured.tls is not None if environment.tls is None else environment.tls
    return security.caller(secured, tls=tls, token_file=environment.token_file)


def _check(settings: config.Config, arguments: argparse.Namespace) -> None:
    """Raises ConfigError where the file lacks what only a running service needs."""
    errors = []
    if not settings.run.id:
        errors.append("run.id: is empty; set it, the same for every service of the run")
    if not settings.redis.url:
        errors.append("redis.url: is empty; set redis://host:port/db")
    if not settings.inference.addresses:
        errors.append("inference.addresses: is empty; list host:port of each engine")
    errors += [
        f"environments.{name}.address: is empty; set host:port of its server"
        for name, environment in settings.environments.items()
        if not environment.address and environment.driver == "gateway"
    ]
    if not arguments.openai_listen:
        errors += [
            f"environments.{name}.driver: is external, but no agent can reach this gateway; give it --openai-listen"
            for name, environment in settings.environments.items()
            if environment.driver == "external"
        ]
    if errors:
        raise config.ConfigError(arguments.config, errors)


def _connect(settings: config.Redis) -> Any:
    try:
        return connect(settings.url, timeout_s=settings.timeout_s)
    except ValueError as error:
        raise StartupError(f"redis.url {settings.place!r} is no address ({error}); use redis://host:port/db") from error


async def _open(streams: Streams, settings: config.Redis) -> None:
    """Opens the streams, waiting for Redis within its timeout."""
    deadline_s = time.monotonic() + settings.timeout_s
    while True:
        try:
            async with asyncio.timeout(settings.timeout_s):
                await streams.open()
            return
        except (RedisError, TimeoutError) as error:
            if time.monotonic() > deadline_s:
                line = " ".join(str(error).split()) or "no reply"
                message = f"Redis at {settings.place} cannot be used ({line}); {remedy(settings.url, error)}"
                raise StartupError(message) from error
            await asyncio.sleep(0.2)


def _raise_file_limit() -> None:
    """An episode takes a connection to its engine; the usual soft limit is 1024 files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _collect_seldom() -> None:
    """Thousands of episodes are many live objects: looking through them at the default pace took a tenth of the
    processor time of a step, and each full look holds up the event loop."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m services.rollout",
        description="A rollout gateway: claims tickets from Redis, runs their episodes against environments and"
        " engines, and publishes the groups. Run as many as you like.",
    )
    parser.add_argument(
        "--config", required=True, metavar="RUN.yaml", help="the run file, YAML, the same for every service"
    )
    parser.add_argument(
        "--listen", default="0.0.0.0:7100", metavar="HOST:PORT", help="RolloutService, gRPC (%(default)s)"
    )
    parser.add_argument(
        "--metrics-listen", default="0.0.0.0:9100", metavar="HOST:PORT", help="Prometheus /metrics (%(default)s)"
    )
    parser.add_argument("--health-listen", default="", metavar="HOST:PORT", help=rpc.HEALTH_LISTEN_HELP)
    parser.add_argument(
        "--openai-listen",
        default="",
        metavar="HOST:PORT",
        help="OpenAI-compatible HTTP for agents outside, which drive episodes of environments whose driver is external"
        " (off)",
    )
    parser.add_argument("--name", required=True, help="name of this gateway, unique within the run")
    arguments = parser.parse_args()
    rpc.main(lambda: run(arguments))


if __name__ == "__main__":
    main()
