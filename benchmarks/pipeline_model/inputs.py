"""Where the model's numbers come from: our own benchmarks, published figures of the hardware, and assumptions.

Every number has its source with it, and `inputs` is printed with the results.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks import results

_V6E = "https://cloud.google.com/tpu/docs/v6e"
_DELTA = "docs/decisions.md: RL steps of SmolLM2-135M in bfloat16, learning rate 1e-5, the greatest of three"
_QWEN3 = "config.json of Qwen/Qwen3-4B"


@dataclass(frozen=True)
class Input:
    """One number."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Inputs:
    """Of an agent of Qwen3-4B on TPU v6e, one chip an engine, as k8s/values/spot-engines.yaml deploys it."""

    gateway_step_s: Input
    redis_entry_s: Input
    redis_byte_s: Input
    ingest_group_s: Input
    ingest_byte_s: Input
    bytes_per_action_token: Input
    bytes_per_observed_token: Input
    parameters: Input
    kv_bytes_per_token: Input
    hbm_bytes_per_s: Input
    peak_flops: Input
    decode_efficiency: Input
    compute_efficiency: Input
    max_running: Input
    slots: Input
    stream_bytes_per_s: Input
    egress_bytes_per_s: Input
    delta_fraction: Input
    piece_fraction: Input
    copy_bytes_per_s: Input
    swap_s: Input

    def rows(self) -> list[tuple[str, Input]]:
        """Name and input, in order."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def read(folder: Path = results.FOLDER) -> Inputs:
    """The inputs, with what our benchmarks have measured. Raises FileNotFoundError before they have."""
    gateway, bus = (json.loads((folder / f"{name}.json").read_text()) for name in ("gateway", "bus"))
    path = folder / "weights.json"
    weights = json.loads(path.read_text()) if path.exists() else {}
    grpc = "grpc.aio, protobuf in pieces of 1 MB and a raised malloc threshold, on two cores of an AMD EPYC"
    return Inputs(
        gateway_step_s=Input(_ours(gateway, "gateway_cpu_per_step") * 1e-6, "s", "results/gateway.json"),
        redis_entry_s=Input(_ours(bus, "bus_redis_cpu_per_entry") * 1e-6, "s", "results/bus.json"),
        redis_byte_s=Input(_ours(bus, "bus_redis_cpu_per_mb") * 1e-12, "s", "results/bus.json"),
        ingest_group_s=Input(_ours(bus, "bus_trainer_cpu_per_group") * 1e-6, "s", "results/bus.json"),
        ingest_byte_s=Input(_ours(bus, "bus_trainer_cpu_per_mb") * 1e-12, "s", "results/bus.json"),
        bytes_per_action_token=Input(_ours(bus, "bus_bytes_per_action_token"), "bytes", "results/bus.json"),
        bytes_per_observed_token=Input(8.0, "bytes", "an int32 id, and about 4 characters of text kept for people"),
        parameters=Input(4.02e9, "1", _QWEN3),
        kv_bytes_per_token=Input(147_456, "bytes", f"{_QWEN3}: 36 layers, 8 heads of 128, keys and values, bfloat16"),
        hbm_bytes_per_s=Input(1.64e12, "bytes/s", _V6E),
        peak_flops=Input(918e12, "FLOP/s", f"{_V6E}, bfloat16"),
        decode_efficiency=Input(0.6, "1", "assumed: share of the memory's rate that decoding reaches"),
        compute_efficiency=Input(0.4, "1", "assumed: share of peak that prefill and training reach"),
        max_running=Input(64, "requests", "k8s/values/spot-engines.yaml, inference.max_running_requests"),
        slots=Input(512, "episodes", "k8s/values/spot-engines.yaml, rollout.max_concurrent_episodes"),
        stream_bytes_per_s=_measured(weights, "weights_pull_bulk", 1e6, Input(2.3e9, "bytes/s", f"measured: {grpc}")),
        egress_bytes_per_s=Input(4.1e9, "bytes/s", f"measured, of one process and core: {grpc}"),
        delta_fraction=_measured(weights, "weights_delta_bytes_1e-05", 1.0, Input(0.0123, "1", _DELTA)),
        piece_fraction=Input(0.1, "1", f"{_QWEN3}: the embedding, 151936 x 2560"),
        copy_bytes_per_s=Input(5e9, "bytes/s", "assumed: to or from a chip, hashed"),
        swap_s=Input(0.05, "s", "assumed: an engine stands still between two decode steps"),
    )


def _measured(figures: dict[str, dict[str, float]], metric: str, scale: float, otherwise: Input) -> Input:
    """What results/weights.json says, if it does."""
    if metric not in figures:
        return otherwise
    return Input(_ours(figures, metric) * scale, otherwise.unit, f"results/weights.json, {metric}")


def _ours(figures: dict[str, dict[str, float]], metric: str) -> float:
    return figures[metric]["ours"]
