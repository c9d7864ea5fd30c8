"""The run's settings as the engine's own arguments. docs/engines.md tells why each departs from its default."""

from __future__ import annotations

from sgl_jax.srt.server_args import ServerArgs

from headrace.config import Config
from services.inference.hosts import Hosts


def server_arguments(config: Config, hosts: Hosts) -> ServerArgs:
    inference = config.inference
    tpu = inference.device == "tpu"
    # XLA for CPU compiles a batch of one to a program that copies the whole cache: 3.7 ms a step instead of 1.1.
    smallest = 2 if inference.device == "cpu" else 1
    chunk = inference.prefill_chunk_tokens
    devices = inference.tensor_parallel * inference.data_parallel
    lora = inference.lora
    arguments = ServerArgs(
        model_path=str(config.model_path),
        load_format="dummy",
        dtype=inference.dtype,
        device=inference.device,
        context_length=inference.context_length,
        max_running_requests=inference.max_running_requests,
        max_total_tokens=inference.kv_cache_tokens,
        chunked_prefill_size=chunk,
        max_prefill_tokens=max(chunk, inference.context_length),
        precompile_bs_paddings=sorted({max(smallest, size) for size in inference.batch_buckets}),
        precompile_token_paddings=[size for size in (64, 256, 1024, 4096) if size < chunk] + [chunk],
        page_size=inference.page_size,
        # What SGLang-JAX calls tensor parallelism is all devices; its data parallelism takes a part of them.
        tp_size=devices,
        dp_size=inference.data_parallel,
        # All hosts' devices, or the first of this one's. How many hosts there are is our business: lockstep.py.
        device_indexes=None if hosts.nodes > 1 else list(range(devices)),
        disable_radix_cache=not inference.prefix_cache,
        attention_backend="fa" if tpu else "native",
        random_seed=inference.seed,
        enable_deterministic_sampling=True,
        disable_overlap_schedule=True,
        disable_precompile=True,
        enable_single_process=True,
        grammar_backend="none",
        stream_interval=1,
        log_level="warning",
        enable_static_lora=lora is not None,
        max_lora_rank=lora.rank if lora else None,
        lora_target_modules=set(lora.layers) if lora else None,
        lora_scaling=lora.scaling if lora else None,
        max_loras_per_batch=1,
    )
    arguments.check_server_args()
    return arguments
