"""Two hundred swaps under load."""

from __future__ import annotations

import numpy as np
import pytest

from tests.inference import engine as engines
from tests.inference.soak import soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# Ten megabytes a version, so that one that is kept shows.
MODEL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "head_dim": 64}
INFERENCE = {
    "context_length": 256,
    "kv_cache_tokens": 4096,
    "max_running_requests": 8,
    "batch_buckets": [8],
    "prefill_chunk_tokens": 64,
}
WARM_UP = 40  # swaps until caches and allocators have what they want


@pytest.mark.parametrize("update", ["in_place", "recompute"])
async def test_two_hundred_swaps_under_load(tmp_path, update):
    with engines.running(tmp_path, model=MODEL, inference={**INFERENCE, "update": update}) as engine:
        engine.publish(1)
        size_bytes = sum(tensor.nbytes for tensor in engine.versions[1].values())
        found = await soak(engine, 200, checked=1)
        assert all(reply["status"] == 200 and len(reply["output_ids"]) == 40 for reply in found.replies)
        assert found.largest_error <= 1e-4
        assert found.errors[-50:].mean() <= 2 * found.errors[:50].mean() + 1e-7
        slope = np.polyfit(np.arange(200 - WARM_UP), found.resident_bytes[WARM_UP:], 1)[0]
        assert slope < 0.05 * size_bytes, f"{slope:.0f} bytes a swap; a version has {size_bytes}"
        versions = {version for reply in found.replies for version, _ in reply["meta_info"]["policy_versions"]}
        assert len(versions) > 150
