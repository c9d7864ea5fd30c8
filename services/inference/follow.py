"""What a host of an engine does that is not its first: the same steps, on its part of the model. Serves nothing."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from headrace.config import Config
from services.inference import staging
from services.inference.build import build, prepare
from services.inference.hosts import Hosts
from services.inference.lockstep import Follower

log = logging.getLogger(__name__)


async def follow(config: Config, hosts: Hosts, stop: asyncio.Event, *, built: Callable[[], None]) -> None:
    """Returns when the first host ends the engine; once `stop` is set, asks it to.

    Args:
        config: the run.
        hosts: the hosts of this engine.
        stop: set when this host is told to stop.
        built: called when the engine is built and has spoilt the handlers of signals.

    Raises:
        RuntimeError: the first host has gone, or a step failed.
        StartupError: the model folder cannot be served, or the first host does not answer.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def died(reason: str) -> None:
        loop.call_soon_threadsafe(_end, ended, reason)

    prepared = prepare(config, hosts)
    scheduler = await asyncio.to_thread(build, config, prepared, connect=functools.partial(Follower, hosts), died=died)
    built()
    follower = scheduler.source
    assert isinstance(follower, Follower)

    def stage(version: int, tensors: Mapping[str, np.ndarray]) -> None:
        runner, first = scheduler.tp_worker.worker.model_runner, scheduler.policy_version < 0
        scheduler.staged[version] = functools.partial(staging.stage, runner, tensors, first=first)

    def finish() -> None:
        loop.call_soon_threadsafe(_end, ended, None)

    scheduler.ended = finish
    follower.receive_versions(stage)
    scheduler.start()
    log.info("host %d of %d follows %s", hosts.rank, hosts.nodes, hosts.coordinator)
    stopping = asyncio.ensure_future(stop.wait())
    ends: list[asyncio.Future[Any]] = [stopping, ended]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        log.info("asking the first host to drain")
        await asyncio.to_thread(follower.leave)
    await ended
    stopping.cancel()


def _end(future: asyncio.Future[None], reason: str | None) -> None:
    if future.done():
        return
    if reason is None:
        future.set_result(None)
    else:
        future.set_exception(RuntimeError(reason))
