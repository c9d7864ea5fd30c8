"""What the trainer's devices can do and hold, as far as they tell."""

from __future__ import annotations

import math

import jax

# Dense bfloat16 operations a second of one chip. https://cloud.google.com/tpu/docs/system-architecture-tpu-vm
_PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}


def flops_utilisation(*, parameters: int, tokens: int, seconds: float) -> float:
    """Share of the devices' peak that a step's forward and backward passes used; NaN where the peak is unknown.

    6 operations a parameter and token, what attention and recomputation cost not counted.
    https://arxiv.org/abs/2204.02311, appendix B
    """
    peak = _PEAK_FLOPS.get(jax.devices()[0].device_kind)
    if peak is None or seconds <= 0:
        return math.nan
    return 6 * parameters * tokens / (seconds * peak * jax.device_count())


def device_memory_bytes() -> float:
    """The most that any local device has held since the start; NaN where devices do not tell."""
    statistics = [device.memory_stats() for device in jax.local_devices()]
    return max(
        (float(of["peak_bytes_in_use"]) for of in statistics if of and "peak_bytes_in_use" in of), default=math.nan
    )
