"""How many programs JAX has built in this process: none once the engine is ready, or requests would wait for them."""

from __future__ import annotations

import functools

import jax

_BUILT = "/jax/core/compile/backend_compile_duration"  # also for a program that comes from the folder of built ones


class Compilations:
    """Counts programs from its creation on."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == _BUILT


@functools.cache
def compilations() -> Compilations:
    """The process's count; the first call begins it."""
    return Compilations()
