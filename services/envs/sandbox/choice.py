"""From the options of an environment to sandboxes of the strength that they name, verified on this machine.

A strength whose isolation cannot be established here is refused with a StartupError that says what is missing. It is
never weakened: the one thing that can be given up, the network, must be given up in the options.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import StartupError
from services.envs.sandbox import verification
from services.envs.sandbox.hazards import Strength
from services.envs.sandbox.sandbox import Limits, SandboxError, Sandboxes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """The options `sandbox` of an environment."""

    strength: Strength = Strength.PROCESS
    limits: Limits = field(default_factory=Limits)
    max_open: int = 16
    """Sandboxes open at once in this server; an episode that needs another waits."""
    allow_network: bool = False
    """Lets the code use the network: of this machine, or Docker's bridge."""
    image: str = "python:3.12-slim"
    """For containers; it is not pulled."""
    runtime: str = "runc"
    """For containers, as the Docker daemon knows it; `runsc` is gVisor's."""
    cpus: float = 1.0
    """Processors' worth of time that one container may take."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Choice:
        """Reads the options. Raises ValueError or TypeError."""
        fields = dict(options)
        fields["strength"] = Strength(fields.get("strength", cls.strength))
        fields["limits"] = Limits(**fields.get("limits", {}))
        choice = cls(**fields)
        if choice.max_open < 1 or choice.cpus <= 0:
            raise ValueError("sandbox.max_open must be at least 1 and sandbox.cpus above 0")
        if choice.strength is Strength.MONTY and choice.allow_network:
            raise ValueError("monty has no network to allow")
        return choice


@functools.cache
def verified(choice: Choice) -> Sandboxes:
    """Sandboxes of a choice; the same ones each time in this process, so that max_open holds for all episodes.

    Opens one to try its isolation, which takes a moment and blocks. Raises StartupError.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # the caller may already run an event loop
        sandboxes, faults = thread.submit(asyncio.run, _verified(choice)).result()
    if sandboxes is None:
        advice = ADVICE[choice.strength]
        raise StartupError(f"sandbox strength {choice.strength.value!r} is impossible here: {faults}. {advice}")
    return sandboxes


ADVICE = {
    Strength.MONTY: "Install pydantic-monty (extra `sandbox`).",
    Strength.PROCESS: "Allow user namespaces, or run as a user other than root on a kernel with Landlock 6 and seccomp;"
    " under Kubernetes use a gVisor runtimeClass; or choose the strength monty or container."
    " If only the network is missing, sandbox.allow_network: true does without.",
    Strength.CONTAINER: "Start the Docker daemon, pull the image, or name another image or runtime.",
}


async def _verified(choice: Choice) -> tuple[Sandboxes | None, str]:
    reasons = []
    for name, make in _makers(choice):
        try:
            sandboxes = make()
            faults = await verification.faults(
                sandboxes,
                choice.strength,
                memory_bytes=choice.limits.memory_bytes,
                allow_network=choice.allow_network,
            )
        except (SandboxError, ImportError) as error:
            faults = [str(error)]
        if not faults:
            log.info("code runs in sandboxes of strength %s, by %s", choice.strength.value, name)
            return make(), ""
        reasons.append(f"by {name}: {', '.join(faults)}")
    return None, "; ".join(reasons)


def _makers(choice: Choice) -> list[tuple[str, Any]]:
    """What makes the sandboxes, by name, best first. Imports wait, for each strength needs its own package."""
    limits, max_open = choice.limits, choice.max_open
    if choice.strength is Strength.MONTY:

        def monty() -> Sandboxes:
            from services.envs.sandbox.monty import MontySandboxes

            return MontySandboxes(limits, max_open=max_open)

        return [("Monty", monty)]
    if choice.strength is Strength.CONTAINER:

        def container() -> Sandboxes:
            from services.envs.sandbox.container import ContainerSandboxes

            return ContainerSandboxes(
                limits,
                max_open=max_open,
                image=choice.image,
                runtime=choice.runtime,
                allow_network=choice.allow_network,
                cpus=choice.cpus,
            )

        return [(choice.runtime, container)]
    from services.envs.sandbox.process import ProcessSandboxes

    make = functools.partial(ProcessSandboxes, limits, max_open=max_open, allow_network=choice.allow_network)
    return [("namespaces", lambda: make(way="namespaces")), ("Landlock", lambda: make(way="landlock"))]
