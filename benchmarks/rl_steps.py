"""Weights of consecutive RL steps, made by the trainer's own learner, for benchmarks of what changes in a step.

The policy-gradient loss on a few short texts, half of them rewarded and half not, at a constant learning rate. The
weights begin off bfloat16's grid, at random within half a step of it, where training for a while brings them: a file's
weights lie on it, and would seem not to change at first. Adam is in its first steps, where every parameter that has a
gradient moves by about the whole rate; later steps change less.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

from headrace import config
from services.trainer import sharding
from services.trainer.model import config as decoder_config
from services.trainer.model import huggingface
from services.trainer.packing import Sample, pack
from services.trainer.train import Learner

ROW_TOKENS, ROWS = 48, 2
TEXTS = (
    "What is 3 + 4? 3 + 4 is 7.",
    "What is 3 + 4? I like the number eleven, it is my favourite.",
    "What is the capital of France? Paris.",
    "What is the capital of France? It is certainly London, I think.",
)


def snapshots(
    folder: Path, *, learning_rate: float, steps: int, dtype: huggingface.Dtype
) -> Iterator[list[tuple[str, np.ndarray]]]:
    """The weights before the first step and after each, by Hugging Face name.

    Args:
        folder: the model with its weights and tokenizer.
    """
    shape, mesh = decoder_config.read(folder), sharding.create_mesh()
    learner = Learner(
        shape, mesh, optimizer=config.Optimizer(learning_rate=learning_rate), steps=steps, loss=config.Loss()
    )
    random = np.random.default_rng(0)
    parameters = {
        name: array * (1 + random.uniform(-(2**-9), 2**-9, array.shape).astype(np.float32))
        for name, array in huggingface.load_parameters(folder, shape, mesh).items()
    }
    state = learner.initial_state(parameters)
    microbatches = pack(_samples(folder), max_row_tokens=ROW_TOKENS, buckets=(ROWS,))
    yield list(huggingface.to_huggingface(state.parameters, dtype))
    for _ in range(steps):
        sums = learner.zeros()
        for microbatch in microbatches:
            sums = learner.accumulate(state.parameters, sums, microbatch)
        state, update = learner.apply(state, sums)
        assert not jax.device_get(update.skipped), "the gradient is not finite"
        yield list(huggingface.to_huggingface(state.parameters, dtype))


def _samples(folder: Path) -> list[Sample]:
    codec = Tokenizer.from_file(str(folder / "tokenizer.json"))
    samples = []
    for number, text in enumerate(TEXTS):
        ids = np.array(codec.encode(text).ids, np.int32)
        mask = np.arange(len(ids)) >= len(ids) // 2
        samples.append(
            Sample(
                trajectory_id=str(number),
                token_ids=ids,
                action_mask=mask,
                behaviour_logprobs=np.where(mask, -2.0, 0).astype(np.float32),
                versions=np.where(mask, 1, -1),
                advantage=1.0 if number % 2 == 0 else -1.0,
            )
        )
    return samples
