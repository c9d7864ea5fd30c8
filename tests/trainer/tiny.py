"""A tiny model on the mesh of this process, for tests of what trains it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from headrace import config
from services.trainer import sharding
from services.trainer.credit import Comparison
from services.trainer.model import decoder
from services.trainer.model.config import DecoderConfig
from services.trainer.packing import Sample
from services.trainer.policy import Policy
from services.trainer.train import Learner

DECODER = DecoderConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=16,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=32,
    tie_word_embeddings=True,
)
ROW_TOKENS = 8
BUCKETS = (1, 2, 4)


@functools.cache  # compiling takes longer than the tests
def learner(*, minibatches: int = 1, loss: config.Loss | None = None) -> Learner:
    """Compiled functions of the tiny model."""
    return Learner(
        DECODER,
        sharding.create_mesh(),
        optimizer=config.Optimizer(learning_rate=1e-2),
        steps=10,
        updates_per_step=minibatches,
        loss=loss or config.Loss(),
    )


def policy(of: Learner, *, seed: int = 0, **options) -> Policy:
    """A fresh policy; `options` are Policy's."""
    parameters = decoder.initial_parameters(DECODER, seed, sharding.create_mesh())
    return Policy(of, of.initial_state(parameters), max_row_tokens=ROW_TOKENS, buckets=BUCKETS, **options)


def sample(number: int, reward: float = 0.0, *, length: int = 4) -> Sample:
    """The last two tokens are sampled."""
    mask = np.arange(length) >= length - 2
    rewards = np.zeros(length)
    rewards[-1] = reward
    return Sample(
        trajectory_id=str(number),
        token_ids=np.arange(3, 3 + length, dtype=np.int32) % 16,
        action_mask=mask,
        behaviour_logprobs=np.where(mask, -2.7, 0).astype(np.float32),
        versions=np.where(mask, 1, -1),
        rewards=rewards,
    )


def group(number: int, rewards: Sequence[float] = (1.0, 0.0)) -> Comparison:
    """Trajectories of one task, of different lengths."""
    samples = [sample(number, reward, length=4 + (number + place) % 3) for place, reward in enumerate(rewards)]
    return Comparison(tuple(samples), (True,) * len(samples))
