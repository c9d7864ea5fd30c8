"""The faults of sglang-jax 0.1.0rc0 that spoil training data or waste a CPU, and what mends each.

`install()` mends all of them in this process, before an engine is built. One function is one fault: its docstring says
what goes wrong, how that was seen, and which version needs the function no longer. tests/inference/test_fixes.py shows
each fault without its fix. Faults that our own code steps around have no function here:

- an idle scheduler spins on one core (`--sleep-on-idle` is read by nothing): our mailbox blocks while there is nothing
  to do (scheduler.py);
- GET /get_load answers 500 (KeyError 'load') and /metrics is empty: server.py has its own;
- unseeded requests share seed 42 once seeds are on: scheduler.py gives each request a seed of its own;
- the watchdog sends SIGQUIT to the parent process: scheduler.py ends this process instead;
- a batch in which only some requests want output logprobs ends the scheduler with an UnboundLocalError, so that one
  chat request beside ours ended the engine: scheduler.py wants them for all;
- a reply whose limit is reached by a stop token says "length": scheduler.py says "stop";
- XLA for CPU copies the whole cache in the program for one request alone: sglang_jax.py decodes two at the least;
- stock precompilation compiles shapes that the fixed engine never runs: sglang_jax.py warms up those that it does.

Shapes: B requests, T query tokens, K cached key slots, L key slots a request, H query heads, G key-value heads,
D head size, Q = H / G.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from sgl_jax.srt.layers import sampler
from sgl_jax.srt.layers.attention import native_backend
from sgl_jax.srt.layers.radix_attention import AttentionType
from sgl_jax.srt.managers import scheduler_output_processor_mixin
from sgl_jax.srt.managers.schedule_batch import ScheduleBatch
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool, merge_kv
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode
from sgl_jax.srt.utils import jax_utils

from headrace.errors import StartupError

VERSION = "0.1.0rc0"
SHORTEST_KEYS = 128  # fewest key slots a request that decoding is compiled for
SHORTEST_PREFILL_KEYS = 256  # fewest key slots that prefilling is compiled for
_MASKED = -1e30


def install(*, without: Collection[str] = ()) -> None:
    """Mends the engine in this process, all faults but those named in `without` (tests show the faults that way).

    Raises:
        StartupError: another version of sglang-jax is installed.
    """
    check_version(importlib.metadata.version("sglang-jax"))
    unknown = set(without) - {fix.__name__ for fix in FIXES}
    if unknown:
        raise ValueError(f"no such fixes: {sorted(unknown)}")
    for fix in FIXES:
        if fix.__name__ not in without:
            fix()


def check_version(installed: str) -> None:
    """Raises StartupError unless it is the version whose insides these fixes know."""
    if installed != VERSION:
        raise StartupError(
            f"sglang-jax {installed} is installed, but this engine is made for {VERSION}; run"
            f" `pip install sglang-jax=={VERSION}`"
        )


def copy_host_arrays() -> None:
    """Host buffers are handed to the device as copies.

    Fault: on CPU, JAX takes a 64-byte-aligned NumPy array without copying it, and the scheduler writes into the buffers
    that it has handed over (`cache_loc_host_buf`) while a step may still read them. Evidence: with alignment forced and
    overlap scheduling on, 46 of 48 greedy requests came out wrong; 0 of 48 with this.
    Needed until: no known version is free of it (HEAD of 2026-08 is not).
    """
    stock = jax_utils.device_array

    def device_array(data: Any, *args: Any, **kwargs: Any) -> Any:
        copied = jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, data)
        return stock(copied, *args, **kwargs)

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("sgl_jax") and getattr(module, "device_array", None) is stock:
            module.device_array = device_array  # type: ignore[attr-defined]


def send_each_token_once() -> None:
    """Replies of more than 50 tokens carry each logprob once.

    Fault: a request that does not stream is flushed every 50 tokens all the same, and the branch for output logprobs
    never advances its offset, so that earlier ones are sent again. Evidence: 51 tokens came with 101 logprobs, 200 with
    500.
    Needed until: no known version is free of it (HEAD of 2026-08 is not).
    """
    scheduler_output_processor_mixin.DEFAULT_FORCE_STREAM_INTERVAL = 1 << 30


def compact_cache_locations() -> None:
    """The list of key slots is as long as the batch needs, rounded up to a bucket.

    Fault: it is padded to batch size times context length, and on CPU, where nothing skips padding, attention pays for
    all of it. Evidence: with the next fix, 590 tokens/s became 4,100 at 16 requests.
    Not for TPUs, whose kernels read by length. Needed until: no known version is free of it.
    """
    stock = ScheduleBatch._merge_cache_loc

    def merge_cache_loc(
        self: ScheduleBatch, bs_paddings: list[int], cache_loc_paddings: list[int], page_size: int, per_dp_bs_size: int
    ) -> np.ndarray:
        lengths = [info.seq_lens for info in self.reqs_info if info.seq_lens is not None and len(info.seq_lens)]
        if self.dp_size != 1 or not lengths:
            return stock(self, bs_paddings, cache_loc_paddings, page_size, per_dp_bs_size)
        aligned_B = -(-np.concatenate(lengths) // page_size) * page_size
        longest = cache_loc_paddings[-1]
        if self.forward_mode.is_extend():
            slots = prefill_keys(int(aligned_B.sum()), longest)
        else:
            size = next(bucket for bucket in sorted(bs_paddings) if bucket >= per_dp_bs_size)
            slots = size * decode_keys(int(aligned_B.max()), longest // max(bs_paddings))
        return stock(self, bs_paddings, [slots] * len(cache_loc_paddings), page_size, per_dp_bs_size)

    ScheduleBatch._merge_cache_loc = merge_cache_loc


def decode_keys(needed: int, longest: int) -> int:
    """Bucket of key slots a request when decoding: powers of two from SHORTEST_KEYS on."""
    return _bucket(needed, SHORTEST_KEYS, 2, longest)


def prefill_keys(needed: int, longest: int) -> int:
    """Bucket of key slots of a whole batch when prefilling: powers of four from SHORTEST_PREFILL_KEYS on."""
    return _bucket(needed, SHORTEST_PREFILL_KEYS, 4, longest)


def attend_in_place() -> None:
    """CPU attention reads and writes the cache where it lies, each request its own keys, heads of any size.

    Faults of the native backend: (a) it reshapes the five-dimensional cache to three dimensions and back, and XLA for
    CPU copies the whole cache of every layer twice a step (8 such copies in the compiled program, 0 with this; one
    request over 8,192 slots took 32.8 ms of CPU a token, 5.9 with this); (b) when decoding, every request is multiplied
    with the keys of all; (c) cached heads are padded to 128 and never cut back, so that head sizes such as 64 (SmolLM2)
    end in a shape error at start.
    Sliding windows, attention sinks and encoders keep the stock path. Not for TPUs, which have kernels of their own.
    Needed until: no known version is free of it.
    """
    stock = native_backend.NativeAttention.__call__

    def attend(  # noqa: PLR0917 - the stock signature
        self: Any, q: jax.Array, k: jax.Array, v: jax.Array, layer: Any, batch: Any, cache: Any, **kwargs: Any
    ) -> tuple[jax.Array, jax.Array]:
        plain = (
            isinstance(cache, MHATokenToKVPool)
            and kwargs.get("attention_sink") is None
            and layer.sliding_window_size in (None, 0, -1)
            and layer.attn_type != AttentionType.ENCODER_ONLY
            and layer.softmax_dtype is None
            and layer.xai_temperature_len <= 0
        )
        if not plain:
            return stock(self, q, k, v, layer, batch, cache, **kwargs)
        return _attend(self.mesh, q, k, v, layer=layer, batch=batch, cache=cache)

    MHATokenToKVPool.set_kv_buffer_legacy = _write_cache
    native_backend.NativeAttention.__call__ = attend


def sample_by_seed() -> None:
    """Sampling with a seed follows the softmax.

    Fault: the stock hash of seed, position and token is far from uniform, so that seeded sampling draws from another
    distribution. Evidence: chi-square 241 on 24 degrees of freedom over seeds 0 to 999; 11.9 on 13 with threefry.
    Needed until: no known version is free of it (HEAD of 2026-08 is not).
    """

    def multinomial_with_seed(operands: tuple[Any, ...]) -> jax.Array:
        inputs_BV, seeds_B, positions_B, _, are_probabilities = operands
        if seeds_B is None:
            return sampler.multinomial(operands)
        logits_BV = jnp.log(inputs_BV) if are_probabilities else inputs_BV

        def draw(seed: jax.Array, position: jax.Array, logits_V: jax.Array) -> jax.Array:
            return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), position), logits_V)

        return jax.vmap(draw)(seeds_B, positions_B, logits_BV).reshape(-1, 1)

    sampler.multinomial_with_seed = multinomial_with_seed


def skip_masks_that_mask_nothing() -> None:
    """A batch whose requests all sample from the whole vocabulary pays for no search of thresholds.

    Fault: top-k and top-p thresholds are searched bit by bit, 31 passes over the logits each, also when every request
    takes all tokens. Evidence: the sampler took 148 ms of CPU a step for 64 requests over 32,000 tokens, 79 with this.
    Needed until: no known version is free of it (HEAD of 2026-08 is not).
    """
    top_k, top_p = sampler.topk_mask, sampler.topp_mask

    def topk_mask(logits_BV: jax.Array, k_B: jax.Array, replace_val: float) -> jax.Array:
        return _unless(jnp.all(k_B >= logits_BV.shape[-1]), top_k, logits_BV, k_B, replace_val)

    def topp_mask(logits_BV: jax.Array, p_B: jax.Array, replace_val: float) -> jax.Array:
        return _unless(jnp.all(p_B >= 1), top_p, logits_BV, p_B, replace_val)

    sampler.topk_mask, sampler.topp_mask = topk_mask, topp_mask


FIXES: tuple[Callable[[], None], ...] = (
    copy_host_arrays,
    send_each_token_once,
    compact_cache_locations,
    attend_in_place,
    sample_by_seed,
    skip_masks_that_mask_nothing,
)
CPU_ONLY = frozenset({"compact_cache_locations", "attend_in_place"})


def _bucket(needed: int, shortest: int, factor: int, longest: int) -> int:
    size = shortest
    while size < needed:
        size *= factor
    return min(size, longest)


def _unless(
    idle: jax.Array, mask: Callable[..., jax.Array], logits_BV: jax.Array, limit_B: jax.Array, replace_val: float
) -> jax.Array:
    return jax.lax.cond(idle, lambda: logits_BV, lambda: mask(logits_BV, limit_B, replace_val=replace_val))


def _replicated(mesh: jax.sharding.Mesh, array: jax.Array) -> jax.Array:
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec()))


def _write_cache(self: Any, layer_id: int, loc: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The layer's cache, [pages, page, 2G / packing, packing, D], with these keys and values in it; loc -1: nowhere."""
    cache = self.kv_buffer[layer_id - self.start_layer]
    pages, page_size = cache.shape[:2]
    loc_T = _replicated(self.mesh, loc)
    loc_T = jnp.where(loc_T >= 0, loc_T, pages * page_size)
    update = _replicated(self.mesh, merge_kv(k, v)[:, 0])
    sharding = PartitionSpec(self.attention_data_partition_axis, None, self.kv_partition_axis, None, None)
    return cache.at[loc_T // page_size, loc_T % page_size].set(update, mode="drop", out_sharding=sharding)


def _attend(
    mesh: jax.sharding.Mesh, q: jax.Array, k: jax.Array, v: jax.Array, *, layer: Any, batch: Any, cache: Any
) -> tuple[jax.Array, jax.Array]:
    """The attention output [T, H * D] and the layer's updated cache."""
    kv = cache.set_kv_buffer_legacy(layer.layer_id, batch.out_cache_loc, k, v)
    heads, groups, page_size = layer.q_head_num, layer.kv_head_num, cache.page_size
    q_THD = _replicated(mesh, q).reshape(q.shape[0], heads, -1)
    size = q_THD.shape[-1]
    scale = size**-0.5 if layer.scaling is None else layer.scaling
    q_TGQD = q_THD.reshape(q_THD.shape[0], groups, heads // groups, size) * scale
    lengths_B = _replicated(mesh, batch.seq_lens)
    aligned_B = -(-lengths_B // page_size) * page_size
    first_B = jnp.cumsum(aligned_B) - aligned_B  # where each request's slots begin in the list of slots
    slots_K = _replicated(mesh, batch.cache_loc)

    def keys_and_values(slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        sharding = PartitionSpec(*[None] * slots.ndim, "tensor", None, None)
        found = kv.at[slots // page_size, slots % page_size].get(out_sharding=sharding)
        found = _replicated(mesh, found).reshape(*slots.shape, 2 * groups, found.shape[-1])[..., :size]
        return found[..., ::2, :], found[..., 1::2, :]

    if batch.forward_mode == ForwardMode.DECODE:
        places_L = jnp.arange(slots_K.shape[0] // q.shape[0])
        seen_BL = places_L[None] < lengths_B[:, None]
        index_BL = jnp.minimum(first_B[:, None] + places_L[None], slots_K.shape[0] - 1)
        keys_BLGD, values_BLGD = keys_and_values(jnp.where(seen_BL, slots_K[index_BL], 0))
        scores = jnp.einsum("bgqd,blgd->bgql", q_TGQD, keys_BLGD)
        weights = jax.nn.softmax(jnp.where(seen_BL[:, None, None], scores, _MASKED), axis=-1)
        out = jnp.einsum("bgql,blgd->bgqd", weights, values_BLGD)
    else:
        seen_TK = _seen_when_prefilling(
            mesh, batch, tokens=q.shape[0], slots=slots_K.shape[0], first_B=first_B, lengths_B=lengths_B
        )
        filled_K = jnp.arange(slots_K.shape[0]) < aligned_B.sum()
        keys_KGD, values_KGD = keys_and_values(jnp.where(filled_K, slots_K, 0))
        scores = jnp.einsum("tgqd,kgd->tgqk", q_TGQD, keys_KGD)
        weights = jax.nn.softmax(jnp.where(seen_TK[:, None, None], scores, _MASKED), axis=-1)
        out = jnp.einsum("tgqk,kgd->tgqd", weights, values_KGD)
    out = out.reshape(out.shape[0], heads * size).astype(q.dtype)
    return jax.sharding.reshard(out, NamedSharding(mesh, PartitionSpec("data", "tensor"))), kv


def _seen_when_prefilling(
    mesh: jax.sharding.Mesh, batch: Any, *, tokens: int, slots: int, first_B: jax.Array, lengths_B: jax.Array
) -> jax.Array:
    """bool[T, K]: which key slots each query token attends to: its own request's, up to itself."""
    new_B = _replicated(mesh, batch.extend_seq_lens)
    cached_B = _replicated(mesh, batch.extend_prefix_lens)
    first_query_B = jnp.cumsum(new_B) - new_B
    places_T, places_K = jnp.arange(tokens), jnp.arange(slots)
    # The owner of a query token or key slot: the first request that ends after it. A slot in the unused tail of a page
    # falls to the next request, at a negative position; what lies behind the last request has no owner.
    owner_T = (places_T[:, None] >= (first_query_B + new_B)[None]).sum(1)
    owner_K = (places_K[:, None] >= (first_B + lengths_B)[None]).sum(1)
    requests = new_B.shape[0]
    last_T, last_K = jnp.minimum(owner_T, requests - 1), jnp.minimum(owner_K, requests - 1)
    position_T = cached_B[last_T] + places_T - first_query_B[last_T]
    position_K = places_K - first_B[last_K]
    real = (owner_T < requests)[:, None] & (position_K >= 0)[None]
    return real & (owner_T[:, None] == owner_K[None]) & (position_K[None] <= position_T[:, None])
