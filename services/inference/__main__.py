"""Starts one engine: wiring only. SIGTERM drains it.

It listens at once, is ready when it holds weights, and waits for the trainer as long as need be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NoReturn

import uvicorn
import uvloop

from headrace import address, config, model_folder, rpc, security, telemetry, tracing
from headrace.errors import AddressInUse
from services.inference import peers, vllm_puller
from services.inference.guard import Guard
from services.inference.hosts import Hosts, check
from services.inference.lineage import Lineage
from services.inference.metrics import Metrics
from services.inference.server import Server
from services.inference.shelf import Shelf
from services.inference.weights import Hold, Puller, Version

log = logging.getLogger("services.inference")

_KEEP_ALIVE_S = 300  # longer than gateways keep an idle connection, so that they, not we, close it


async def run(arguments: argparse.Namespace) -> None:
    """Serves until a signal."""
    settings = config.load(arguments.config)
    telemetry.configure(arguments.name, level=settings.telemetry.log_level, log_format=settings.telemetry.log_format)
    if settings.telemetry.log_level != "debug":
        logging.getLogger("sgl_jax").setLevel(logging.WARNING)
    _check(settings, Path(arguments.config))
    tracing.configure(
        "engine", instance=arguments.name, run_id=settings.run.id, **settings.telemetry.traces.model_dump()
    )
    secured = security.read(settings.security.tls, settings.security.token_file)
    model_folder.ensure(settings)
    _prepare_jax(settings)
    stop = rpc.stop_signal()
    if settings.inference.dialect == "vllm":
        return await _pull_for_vllm(settings, arguments, secured, stop)
    hosts = Hosts(arguments.nodes, arguments.node_rank, arguments.coordinator)
    check(hosts, settings.inference.tensor_parallel * settings.inference.data_parallel)
    if hosts.rank:
        follower = await _engine_module("follow", hosts)
        try:
            return await follower.follow(settings, hosts, stop, built=lambda: _take_signals_back(stop))
        except RuntimeError as error:
            log.error("the host ends: %s", error)
            _exit_without_waiting(1)
    loop = asyncio.get_running_loop()
    death: asyncio.Future[None] = loop.create_future()

    def died(reason: str) -> None:
        loop.call_soon_threadsafe(_fail, death, reason)

    def leaving() -> None:
        loop.call_soon_threadsafe(stop.set)

    metrics, hold = Metrics(), Hold()
    server = Server(metrics, hold)
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(_listening(arguments.listen, Guard(server, secured), secured.tls))
        log.info("engine %s of run %s listens on port %d", arguments.name, settings.run.id, port)
        build = asyncio.ensure_future(_build(settings, hosts, died, leaving))
        await asyncio.wait([build, asyncio.ensure_future(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
        if not build.done():
            log.info("stopped before the engine was built")
            _exit_without_waiting()
        engine, stock = build.result()
        _take_signals_back(stop)
        stack.callback(engine.stop)
        if stock is not None:
            server.stock = await stack.enter_async_context(stock())
        server.engine = metrics.source = engine
        log.info("the engine is built and waits for weights from %s", settings.trainer.address)

        lineage = Lineage()

        async def install(version: Version) -> None:
            seconds = await engine.install(version, hold)
            metrics.installed(*seconds)
            earlier = lineage.add(version.policy_version, version.root_hash)
            if earlier is not None:
                metrics.returned_to_older_weights()
                log.warning(
                    "version %d has the weights that version %d had: the trainer has gone back to an older step",
                    version.policy_version,
                    earlier,
                )
            log.info("version %d is in use: staged in %.3f s, swapped in %.4f s", version.policy_version, *seconds)

        channel = await stack.enter_async_context(rpc.channel(settings.trainer.address, security=secured))
        shelf, serving_address = Shelf(), ""
        if arguments.weights_listen:
            serving_address = await stack.enter_async_context(
                peers.serving(
                    shelf,
                    arguments.weights_listen,
                    bulk_listen=arguments.bulk_listen,
                    security=secured,
                    run_id=settings.run.id,
                )
            )
        puller = Puller(
            channel,
            engine=arguments.name,
            run_id=settings.run.id,
            install=install,
            observer=metrics,
            hold=hold,
            shelf=shelf,
            keeps=bool(settings.trainer.delta_bases or serving_address),
            trainer_host=address.split(settings.trainer.address)[0],
            serving_address=serving_address,
            security=secured,
            peer_name=address.split(settings.inference.addresses[0])[0] if settings.inference.addresses else "",
        )
        async with asyncio.TaskGroup() as tasks:
            pulling = tasks.create_task(puller.run())
            explaining = tasks.create_task(rpc.explain_failures(channel, settings.trainer.address, secured))
            ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait()), death, pulling]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                if hosts.nodes > 1:
                    log.error("the engine ends: %s", death.exception())
                    _exit_without_waiting(1)
                death.result()
            log.info("draining")
            await server.drain(settings.inference.drain_timeout_s)
            pulling.cancel()
            explaining.cancel()
    log.info("stopped")


async def _pull_for_vllm(
    settings: config.Config, arguments: argparse.Namespace, secured: security.Security, stop: asyncio.Event
) -> None:
    async with rpc.channel(settings.trainer.address, security=secured) as channel:
        await vllm_puller.run(
            settings,
            name=arguments.name,
            stop=stop,
            channel=channel,
            security=secured,
            listening=lambda application: _listening(arguments.listen, Guard(application, secured), secured.tls),
        )


async def _build(
    settings: config.Config, hosts: Hosts, died: Callable[[str], None], leaving: Callable[[], None]
) -> Any:
    module = await _engine_module("sglang_jax", hosts)
    return await module.Engine.start(settings, died=died, hosts=hosts, leaving=leaving)


async def _engine_module(name: str, hosts: Hosts) -> Any:
    # Loaded only now, and in a thread: JAX reads its settings when it is loaded, and that takes seconds.
    def load() -> Any:
        importlib.import_module("services.inference.join").join(hosts)
        return importlib.import_module(f"services.inference.{name}")

    return await asyncio.to_thread(load)


def _exit_without_waiting(code: int = 0) -> NoReturn:
    """Ends the process while a thread still builds the engine or waits for a host that has gone."""
    logging.shutdown()
    os._exit(code)


def _take_signals_back(stop: asyncio.Event) -> None:
    """Registers our handlers again: building the engine has put others, which print stack traces, before them."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


def _fail(future: asyncio.Future[None], reason: str) -> None:
    if not future.done():
        future.set_exception(RuntimeError(reason))


def _check(settings: config.Config, path: Path) -> None:
    """Raises ConfigError where the file lacks what only a running service needs."""
    errors = []
    if not settings.run.id:
        errors.append("run.id: is empty; set it, the same for every service of the run")
    if not settings.trainer.address:
        errors.append("trainer.address: is empty; set host:port of the trainer")
    if errors:
        raise config.ConfigError(str(path), errors)


def _prepare_jax(settings: config.Config) -> None:
    """Settings that JAX and the engine take from the environment alone, made from ours."""
    os.environ["JAX_PLATFORMS"] = settings.inference.device
    os.environ["TQDM_DISABLE"] = "1"
    folder = (settings.inference.compilation_cache or settings.run.directory / "compiled").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("every start compiles anew: %s cannot be made (%s)", folder, error.strerror)
    else:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)


@contextlib.asynccontextmanager
async def _listening(listen: str, application: object, tls: security.Tls | None) -> AsyncIterator[int]:
    """An HTTP server on "host:port" (port 0: any) while the body runs; yields the port."""
    host, port = address.of_flag("--listen", listen)
    try:
        listener = socket.create_server((host or "0.0.0.0", port), backlog=4096)
    except OSError as error:
        raise AddressInUse(f"--listen {listen} cannot be bound: is the port taken? choose another") from error
    http = _Http(
        uvicorn.Config(
            application,  # type: ignore[arg-type]
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            ssl_certfile=tls.files[0] if tls and tls.files else None,
            ssl_keyfile=tls.files[1] if tls and tls.files else None,
        )
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(http.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            http.should_exit = True


class _Http(uvicorn.Server):
    """uvicorn, with signals left to us."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m services.inference",
        description="An inference engine: SGLang-JAX behind HTTP. Listens at once, pulls the policy's weights from the"
        " trainer, however late that starts, is ready (GET /ready) when it holds some, and follows each new version."
        " SIGTERM drains it. Run as many as you like.",
    )
    parser.add_argument("--config", required=True, metavar="RUN.yaml", help="the run file, the same for every service")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="where to serve HTTP, /metrics included")
    parser.add_argument(
        "--weights-listen",
        default="",
        metavar="HOST:PORT",
        help="where to serve weights to other engines, over gRPC (nowhere)",
    )
    parser.add_argument(
        "--bulk-listen", default="", metavar="HOST:PORT", help="where to send their bytes over plain TCP (nowhere)"
    )
    parser.add_argument("--name", default="engine-0", help="unique among the run's engines (%(default)s)")
    group = parser.add_argument_group("an engine of several hosts, all started with the same settings but the rank")
    group.add_argument(
        "--nodes",
        type=int,
        default=int(os.environ.get("LWS_GROUP_SIZE", "1")),
        help="how many hosts (default: LWS_GROUP_SIZE, which a LeaderWorkerSet sets, else 1)",
    )
    group.add_argument(
        "--node-rank",
        type=int,
        default=int(os.environ.get("LWS_WORKER_INDEX", "0")),
        help="this host, from 0, which alone serves HTTP (default: LWS_WORKER_INDEX, else 0)",
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        default=f"{os.environ.get('LWS_LEADER_ADDRESS', '')}:5000",
        help="host 0, with a port that is free there, the one above it too (default: port 5000 of LWS_LEADER_ADDRESS)",
    )
    arguments = parser.parse_args()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    rpc.main(lambda: run(arguments))


if __name__ == "__main__":
    main()
