"""Where arrays lie, and that eight devices compute what one does.

Run as a program, this file takes one training step on the devices that it finds and prints it; the test runs it with
eight forced host devices.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from headrace import config
from headrace.config import ConfigError
from services.trainer import sharding
from services.trainer.model import decoder
from services.trainer.model.config import DecoderConfig
from services.trainer.packing import Sample, pack, row_buckets
from services.trainer.train import Learner
from tests.numpy_decoder import LLAMA, QWEN3


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.embed_tokens.weight", (8, 4), ("tensor", "fsdp")),
        ("lm_head.weight", (8, 4), ("tensor", "fsdp")),
        ("model.layers.0.self_attn.k_proj.weight", (8, 4), ("tensor", "fsdp")),
        ("model.layers.0.self_attn.k_proj.bias", (8,), ("tensor",)),
        ("model.layers.11.self_attn.o_proj.weight", (4, 8), ("fsdp", "tensor")),
        ("model.layers.0.mlp.down_proj.weight", (4, 8), ("fsdp", "tensor")),
        ("model.layers.0.self_attn.q_norm.weight", (8,), (None,)),
        # 19 words do not divide by 2, 6 units not by 4: those dimensions stay whole.
        ("model.embed_tokens.weight", (19, 4), (None, "fsdp")),
        ("model.layers.0.mlp.up_proj.weight", (8, 6), ("tensor", None)),
    ],
)
def test_parameters_lie_by_their_name(name: str, shape: tuple[int, ...], expected: tuple[str | None, ...]):
    mesh = AbstractMesh((4, 2), ("fsdp", "tensor"))
    assert sharding.parameter_sharding(name, shape, mesh).spec == PartitionSpec(*expected)


def test_a_mesh_that_the_devices_do_not_make_is_refused():
    count = jax.device_count()
    assert sharding.create_mesh(-1, 1).shape == {"data": 1, "fsdp": count, "tensor": 1}
    with pytest.raises(ConfigError, match=r"trainer\.mesh: data .* is not the number of devices"):
        sharding.create_mesh(-1, 1, data=2 * count)
    for fsdp, tensor in [(count, 2), (-1, 2 * count), (count + 1, 1)]:
        with pytest.raises(ConfigError, match=r"trainer\.mesh: .*fsdp .* is not the number of devices"):
            sharding.create_mesh(fsdp, tensor)


# A decoder and the sizes of the data and the tensor axis. Neither 19 and 23 words nor Llama's one key-value head are
# divided by 2.
CASES = {
    "qwen3, 1 x 8 x 1": (replace(QWEN3, num_hidden_layers=1), 1, 1),
    "qwen3, 1 x 4 x 2": (replace(QWEN3, num_hidden_layers=1), 1, 2),
    "qwen3, 2 x 2 x 2": (replace(QWEN3, num_hidden_layers=1), 2, 2),
    "qwen3, 8 x 1 x 1": (replace(QWEN3, num_hidden_layers=1), 8, 1),
    "llama, 1 x 4 x 2": (replace(LLAMA, num_hidden_layers=1), 1, 2),
}


@pytest.mark.timeout(400)
def test_eight_devices_compute_what_one_does():
    found = steps_on_eight_devices()
    single = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    alone = {shape: one_step(shape, single) for shape in {shape for shape, _, _ in CASES.values()}}
    for case, (shape, data, _) in CASES.items():
        spread, expected = found[case], alone[shape]
        assert spread["shards"] == 8 // data
        assert spread["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        for kind in ("initial", "gradients", "updated"):
            for name, values in expected[kind].items():
                np.testing.assert_allclose(spread[kind][name], values, atol=1e-5, err_msg=f"{case} {kind} {name}")


def steps_on_eight_devices() -> dict[str, dict]:
    # Most of the time goes into compiling; unoptimised code does for one step.
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.trainer.test_sharding"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=380)
    return json.loads(done.stdout)


def one_step(decoder_config: DecoderConfig, mesh: Mesh) -> dict[str, Any]:
    """Loss, gradients and parameters before and after one update of a fixed batch."""
    learner = Learner(
        decoder_config,
        mesh,
        optimizer=config.Optimizer(learning_rate=0.01, epsilon=1e-3),
        loss=config.Loss(entropy_coefficient=0.01),
        steps=1,
    )
    rng = np.random.default_rng(0)
    samples = [
        Sample(
            trajectory_id=str(number),
            token_ids=rng.integers(0, decoder_config.vocab_size, length).astype(np.int32),
            action_mask=np.arange(length) > 2,
            behaviour_logprobs=rng.normal(-3, 0.2, length).astype(np.float32),
            versions=np.zeros(length, np.int64),
            advantage=float(rng.normal()),
        )
        for number, length in enumerate(rng.integers(5, 13, 12))
    ]
    (microbatch,) = pack(samples, max_row_tokens=16, buckets=row_buckets(256, 16, 8))
    parameters = decoder.initial_parameters(decoder_config, 0, mesh)
    state = learner.initial_state(parameters)
    sums = learner.accumulate(state.parameters, learner.zeros(), microbatch)
    summary = sums.metrics.summary()
    gradients = {name: np.array(value) / summary["tokens"] for name, value in sums.gradients.items()}
    state, _ = learner.apply(state, sums)
    (moment, *_) = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.shape == (40, 24)]
    return {
        "loss": summary["loss"],
        "shards": len({shard.index for shard in moment.addressable_shards}),
        "initial": {name: np.array(value).tolist() for name, value in parameters.items()},
        "gradients": {name: value.tolist() for name, value in gradients.items()},
        "updated": {name: np.array(value).tolist() for name, value in state.parameters.items()},
    }


if __name__ == "__main__":
    steps = {
        case: one_step(shape, sharding.create_mesh(-1, tensor, data=data))
        for case, (shape, data, tensor) in CASES.items()
    }
    print(json.dumps(steps))
