"""Section `inference`: the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from headrace.config.section import Address, Count, Seconds, Section


class Inference(Section):
    """The engines."""

    replicas: Count = Field(1, description="engines that `headrace run` starts")
    addresses: list[Address] = Field([], description="host:port of each engine")
    device: Literal["cpu", "tpu", "cuda"] = "cpu"
    context_length: Count = Field(256, description="tokens of one request at the most")
    max_running_requests: Count = 64
    kv_cache_tokens: Count = Field(16_384, description="capacity of the key-value cache")
    prefill_chunk_tokens: Count = 512
    batch_buckets: list[int] = Field([1, 16, 64], description="batch sizes that decoding is compiled for")
    dtype: Literal["float32", "bfloat16"] = "float32"
    prefix_cache: bool = True
    tensor_parallel: Count = 1
    page_size: Count = 1
    update: Literal["in_place", "recompute"] = Field(
        "in_place",
        description="what new weights do to running requests: in_place keeps their keys and values, recompute prefills"
        " them again, so that no token is sampled from keys of other weights",
    )
    drain_timeout_s: Seconds = Field(
        8.0, description="time that running requests get to end after SIGTERM; then they are handed over as they are"
    )
    seed: int = Field(0, ge=0)
    compilation_cache: Path | None = Field(
        None, description="folder of compiled programs, kept between starts; default: `compiled` in run.directory"
    )
