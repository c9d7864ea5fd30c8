"""Builds the scheduler with its model and its compiled programs, alone or as one host of several."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from sgl_jax.srt.server_args import PortArgs, ServerArgs

from headrace.config import Config
from headrace.errors import StartupError
from services.inference import sglang_jax_fixes
from services.inference.compilation import compilations
from services.inference.hosts import Hosts
from services.inference.scheduler import Source, VersionedScheduler
from services.inference.server_arguments import server_arguments
from services.inference.warm_up import warm_up

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The engine's arguments, and the sockets of its stock API."""

    arguments: ServerArgs
    ports: PortArgs


def prepare(config: Config, hosts: Hosts) -> Prepared:
    """Mends the engine in this process and makes its arguments."""
    compilations()
    sglang_jax_fixes.install(without=() if config.inference.device == "cpu" else sglang_jax_fixes.CPU_ONLY)
    arguments = server_arguments(config, hosts)
    return Prepared(arguments, PortArgs.init_new(arguments))


def build(
    config: Config, prepared: Prepared, *, connect: Callable[[], Source], died: Callable[[str], None]
) -> VersionedScheduler:
    """A scheduler that is ready to be started. Blocks for seconds to minutes; of several hosts, until all have come.

    Args:
        config: the run.
        prepared: what `prepare` returned.
        connect: makes the source of commands.
        died: called, from the scheduler's thread, with the reason when it can go on no more.

    Raises:
        StartupError: the model folder cannot be served, or a host does not come.
    """
    try:
        scheduler = VersionedScheduler(
            prepared.arguments, prepared.ports, connect(), update=config.inference.update, died=died
        )
        warm_up(scheduler)
    except (ValueError, KeyError, OSError, AttributeError) as error:
        if isinstance(error, StartupError):
            raise
        log.exception("the engine cannot be built")
        raise StartupError(
            f"the engine cannot serve {config.model_path}: {' '.join(str(error).split())}; see the log above"
        ) from error
    return scheduler
