"""Looks for each fault of the installed sglang-jax and prints what it found as JSON.

`python -m tests.inference.faults`; `--stock` leaves the faults in. Run as a process of its own, because fixes change
the engine for the whole process.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from scipy import stats
from sgl_jax.srt.layers import sampler
from sgl_jax.srt.layers.attention.native_backend import NativeAttention
from sgl_jax.srt.layers.radix_attention import RadixAttention
from sgl_jax.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sgl_jax.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode
from sgl_jax.srt.sampling.sampling_params import SamplingParams
from sgl_jax.srt.utils import jax_utils
from sgl_jax.srt.utils.mesh_utils import create_device_mesh

from headrace.errors import StartupError
from services.inference import sglang_jax_fixes

HEADS, GROUPS, SIZE, SLOTS, REQUESTS, CONTEXT = 4, 2, 64, 4096, 4, 512


def main() -> None:
    without = [fix.__name__ for fix in sglang_jax_fixes.FIXES] if "--stock" in sys.argv else []
    sglang_jax_fixes.install(without=without)
    mesh = create_device_mesh(ici_parallelism=[1, 1], dcn_parallelism=[1, 1])
    with jax.set_mesh(mesh):
        found = {
            "host_array_aliased": host_array_aliased(mesh),
            "logprobs_of_120_tokens": logprobs_of_120_tokens(),
            "key_slots_of_a_decode_step": key_slots_of_a_decode_step(),
            **attention(mesh),
            "p_value_of_seeded_sampling": p_value_of_seeded_sampling(),
            "threshold_searches_that_always_run": threshold_searches_that_always_run(),
            "what_another_version_hears": what_another_version_hears(),
        }
    print(json.dumps(found))


def host_array_aliased(mesh: jax.sharding.Mesh) -> bool:
    """Whether a later write to a host buffer reaches the device array that was made of it."""
    raw = np.zeros(4096 * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    buffer = raw[start : start + 4096 * 4].view(np.int32)
    array = jax_utils.device_array(buffer, sharding=NamedSharding(mesh, PartitionSpec()))
    jax.block_until_ready(array)
    buffer[:] = 7
    return bool((np.asarray(array) == 7).any())


def logprobs_of_120_tokens() -> int:
    """Logprobs that a request of 120 tokens sends."""
    sent: list[Any] = []
    scheduler = SimpleNamespace(
        is_generation=True,
        stream_interval=1,
        skip_tokenizer_init=True,
        spec_algorithm=None,
        _comm_backend=SimpleNamespace(send_pyobj=sent.append),
    )
    parameters = SamplingParams(max_new_tokens=120)
    parameters.normalize(None)
    req = Req("r", "", [1, 2, 3], parameters, return_output_logprob_only=True)
    for token in range(120):
        req.output_ids.append(token)
        req.output_token_logprobs_val.append(-1.0)
        req.output_token_logprobs_idx.append(token)
        if token == 119:
            req.finished_reason = FINISH_LENGTH(120)
        SchedulerOutputProcessorMixin.stream_output_generation(scheduler, [req], False, True)
    return sum(len(values) for out in sent for values in out.output_token_logprobs_val)


def key_slots_of_a_decode_step() -> int:
    """Key slots that a step of 4 requests of 20 tokens attends over."""
    pool = SimpleNamespace(
        cache_loc_host_buf=np.zeros(REQUESTS * CONTEXT, np.int32), req_to_token=np.zeros((8, CONTEXT), np.int32)
    )
    info = SimpleNamespace(seq_lens=np.full(REQUESTS, 20), req_pool_indices=np.arange(REQUESTS))
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, dp_size=1, reqs_info=[info], req_to_token_pool=pool)
    return len(ScheduleBatch._merge_cache_loc(batch, [1, REQUESTS], [CONTEXT, REQUESTS * CONTEXT], 1, REQUESTS))


def attention(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Width of the output of a decode step with heads of 64, and copies of the whole cache in its program."""
    pool = MHATokenToKVPool(SLOTS, 1, jnp.float32, GROUPS, 128, 1, mesh)
    layer = RadixAttention(HEADS, SIZE, SIZE**-0.5, GROUPS, 0)
    backend = NativeAttention(HEADS, GROUPS, mesh)
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def step(cache: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, ints: dict[str, jax.Array]) -> Any:
        pool.kv_buffer = [cache]
        batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, extend_prefix_lens=None, extend_seq_lens=None, **ints)
        return backend(q, k, v, layer, batch, pool)

    def put(array: np.ndarray, *axes: str | None) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    rng = np.random.default_rng(0)
    q = put(rng.normal(size=(REQUESTS, HEADS * SIZE)).astype(np.float32), "data", "tensor")
    k, v = (
        put(np.pad(rng.normal(size=(REQUESTS, GROUPS, SIZE)), ((0, 0), (0, 0), (0, 64))).astype(np.float32), "data")
        for _ in range(2)
    )
    ints = {
        "seq_lens": np.full(REQUESTS, 3, np.int32),
        "cache_loc": np.arange(REQUESTS * CONTEXT, dtype=np.int32),
        "out_cache_loc": np.arange(2, 2 + REQUESTS, dtype=np.int32),
    }
    ints = {name: jax.device_put(value, sharding) for name, value in ints.items()}
    program = jax.jit(step, donate_argnums=0).lower(pool.kv_buffer[0], q, k, v, ints)
    out, _ = program.out_info
    shape = f"f32[{SLOTS + 1},"
    copies = [
        line
        for line in program.compile().as_text().splitlines()
        if " copy(" in line and shape in line.split(" copy(")[0]
    ]
    return {"attention_width": out.shape[-1], "copies_of_the_cache": len(copies)}


def p_value_of_seeded_sampling() -> float:
    """Chi-square of the tokens that 4,000 seeds draw from one distribution."""
    draws = 4000
    logits = np.log(np.arange(1.0, 11.0))
    seeds, positions = jnp.arange(draws, dtype=jnp.int32), jnp.full(draws, 17, jnp.int32)
    inputs = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (draws, 10))
    drawn = sampler.multinomial_with_seed((inputs, seeds, positions, None, False))
    expected = np.arange(1.0, 11.0) / 55 * draws
    return float(stats.chisquare(np.bincount(np.asarray(drawn).ravel(), minlength=10), expected).pvalue)


def threshold_searches_that_always_run() -> int:
    """Loops of the top-k and top-p masks that stand under no condition."""

    def masks(logits: jax.Array, k: jax.Array, p: jax.Array) -> jax.Array:
        return sampler.topp_mask(sampler.topk_mask(logits, k, replace_val=-1e12), p, replace_val=-1e12)

    jaxpr = jax.make_jaxpr(masks)(jnp.zeros((2, 50)), jnp.full(2, 1 << 30), jnp.ones(2))
    return sum(equation.primitive.name in ("while", "scan") for equation in _equations(jaxpr.jaxpr))


def what_another_version_hears() -> str:
    """The error at start when another version is installed."""
    sglang_jax_fixes.check_version(sglang_jax_fixes.VERSION)
    try:
        sglang_jax_fixes.check_version("0.2.0")
    except StartupError as error:
        return str(error)
    return ""


def _equations(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "cond":
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


if __name__ == "__main__":
    main()
