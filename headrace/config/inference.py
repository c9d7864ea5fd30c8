"""Section `inference`: the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from headrace.config.section import Address, Count, Seconds, Section


class Vllm(Section):
    """What the puller needs to know of the vLLM server beside it, with `dialect: vllm`."""

    url: str = Field("http://127.0.0.1:8000", description="the server, as the puller beside it reaches it")
    weights_folder: Path = Field(
        Path("/dev/shm/headrace"), description="where versions are handed over; both see it under this path"
    )
    timeout_s: Seconds = Field(600.0, description="deadline of one control call, loading included")


class Lora(Section):
    """An adapter that engines hold beside the base; the trainer's must be the same."""

    rank: Count
    scaling: float = Field(1.0, description="factor of the adapter's output: alpha / rank in PEFT's words")
    layers: list[Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]] = Field(
        min_length=1, description="linear layers that have an adapter, in every block"
    )


class Inference(Section):
    """The engines."""

    dialect: Literal["sglang", "vllm"] = Field(
        "sglang",
        description="what the engines are: our own, or vLLM servers, each with `python -m services.inference` as its"
        " puller beside it (docs/vllm.md)",
    )
    vllm: Vllm = Vllm()
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
    tensor_parallel: Count = Field(1, description="chips that share each layer")
    data_parallel: Count = Field(1, description="groups of such chips in one engine that share its requests; TPUs only")
    page_size: Count = Field(1, description="slots of a page of the key-value cache; 128 is usual on TPUs")
    update: Literal["in_place", "recompute"] = Field(
        "in_place",
        description="what new weights do to running requests: in_place keeps their keys and values, recompute prefills"
        " them again, so that no token is sampled from keys of other weights",
    )
    lora: Lora | None = Field(None, description="lets versions bring an adapter alone, without the base's tensors")
    drain_timeout_s: Seconds = Field(
        8.0, description="time that running requests get to end after SIGTERM; then they are handed over as they are"
    )
    seed: int = Field(0, ge=0)
    compilation_cache: Path | None = Field(
        None, description="folder of compiled programs, kept between starts; default: `compiled` in run.directory"
    )
