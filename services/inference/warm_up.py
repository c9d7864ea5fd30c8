"""Builds every program that serving needs before it begins, so that no request waits for the compiler.

On a TPU the engine's own precompilation does that. Elsewhere the fixes pad a batch to other shapes than the stock
engine, and `shapes` lists them.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import jax
from sgl_jax.srt.managers.schedule_batch import ForwardMode
from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch
from sgl_jax.srt.sampling.sampling_batch_info import SamplingMetadata

from services.inference import sglang_jax_fixes
from services.inference.scheduler import VersionedScheduler


def warm_up(scheduler: VersionedScheduler) -> None:
    """Compiles every shape that serving needs, so that no request waits for the compiler."""
    worker = scheduler.tp_worker
    if jax.default_backend() == "tpu":
        worker.run_precompile()
    else:
        for shape in shapes(scheduler):
            _compile(worker, scheduler.mesh, shape)
    # Precompilation takes seeds from here; requests must not, or all without one would share the same.
    os.environ["SGLANG_ENABLE_DETERMINISTIC_SAMPLING"] = "0"


class Shape(NamedTuple):
    mode: ForwardMode
    batch: int  # requests, padded
    tokens: int  # new tokens, padded
    slots: int  # key slots


def shapes(scheduler: VersionedScheduler) -> list[Shape]:
    """Every program that serving needs."""
    worker = scheduler.tp_worker
    tokens, batches, slots = worker.get_precompile_paddings()
    longest, per_request = slots[-1], slots[-1] // batches[-1]
    decode = {sglang_jax_fixes.decode_keys(length, per_request) for length in range(1, per_request + 1)}
    most = min(longest, scheduler.max_total_num_tokens)
    if scheduler.server_args.disable_radix_cache:
        most = min(most, tokens[-1] + per_request)  # nothing but one request's earlier chunks precedes new tokens
    prefill = {sglang_jax_fixes.prefill_keys(length, longest) for length in range(1, most + 1)}
    return [
        *(
            Shape(ForwardMode.EXTEND, worker.max_padded_batch_size, new, keys)
            for new in tokens
            for keys in sorted(prefill)
        ),
        *(Shape(ForwardMode.DECODE, size, size, size * keys) for size in batches for keys in sorted(decode)),
    ]


def _compile(worker: Any, mesh: jax.sharding.Mesh, shape: Shape) -> None:
    dummy = worker.compilation_manager._make_dummy_batch(
        shape.batch,
        shape.tokens,
        shape.mode,
        shape.slots,
        dp_size=worker.dp_size,
        per_dp_bs_size=shape.batch // worker.dp_size,
    )
    sampling = SamplingMetadata.from_model_worker_batch(dummy, 0, mesh, worker.model_config.vocab_size)
    if worker.server_args.enable_lora:
        worker.prepare_lora_batch(dummy)
    dummy.forward_batch = ForwardBatch.init_new(dummy, worker.model_runner)
    worker.forward_batch_generation(dummy, launch_done=None, skip_sample=False, sampling_metadata=sampling)
