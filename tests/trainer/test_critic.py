"""services.trainer.critic: the value loss against NumPy, and that it learns what its returns are."""

import jax
import numpy as np
import pytest

from headrace import config
from services.trainer import sharding
from services.trainer.critic import HEAD, Critic
from services.trainer.model import decoder
from services.trainer.packing import pack
from services.trainer.stopwatch import Stopwatch
from tests.trainer import tiny

SETTINGS = config.Critic(optimizer=config.Optimizer(learning_rate=1e-2), value_clip=0.2)
ADVANTAGE = config.Advantage(estimator="gae", gae_lambda=1.0)


@pytest.fixture(scope="module")
def compiled() -> Critic:
    return Critic(
        tiny.DECODER, sharding.create_mesh(), settings=SETTINGS, loss=config.Loss(), steps=1000, updates_per_step=1
    )


@pytest.fixture
def critic(compiled: Critic) -> Critic:
    compiled.start_from(decoder.initial_parameters(tiny.DECODER, 0, sharding.create_mesh()))
    return compiled


def batch(samples):
    (microbatch,) = pack(samples, max_row_tokens=tiny.ROW_TOKENS, buckets=tiny.BUCKETS)
    return microbatch


def test_begins_at_zero_everywhere(critic: Critic):
    assert not np.asarray(critic.values(batch(tiny.group(0).samples))).any()


def test_the_value_loss_agrees_with_numpy(critic: Critic):
    critic.state.parameters[HEAD] = jax.random.normal(jax.random.key(1), critic.state.parameters[HEAD].shape)
    samples = tiny.group(0, (1.0, -2.0, 0.5)).samples
    old = [np.full(len(sample.token_ids), 0.1, np.float32) for sample in samples]
    taught = critic.credited(samples, old, ADVANTAGE)
    microbatch = batch(taught)
    values = np.asarray(critic.values(microbatch), np.float64)
    critic.accumulate(microbatch)
    mask, returns = microbatch.action_mask_BT, microbatch.returns_BT
    clipped = 0.1 + np.clip(values - 0.1, -0.2, 0.2)
    expected = 0.5 * np.maximum((values - returns) ** 2, (clipped - returns) ** 2)[mask]
    assert np.abs(values[mask] - 0.1).max() > 0.2  # the clip is met
    critic.update()
    assert critic.end_step()["value_loss"] == pytest.approx(expected.mean(), rel=1e-4)


def test_a_value_reads_what_was_read_before_the_token_was_chosen(critic: Critic):
    critic.state.parameters[HEAD] = jax.random.normal(jax.random.key(1), critic.state.parameters[HEAD].shape)
    microbatch = batch([tiny.sample(0, length=6)])
    before = np.asarray(critic.values(microbatch))
    microbatch.tokens_BT[0, 4] += 1
    after = np.asarray(critic.values(microbatch))
    np.testing.assert_array_equal(after[0, :5], before[0, :5])
    assert after[0, 5] != before[0, 5]


def test_learns_its_returns_and_advantages_vanish(critic: Critic):
    """Rewards that depend on the prompt alone: nothing is better or worse than expected once that is known."""
    samples = [tiny.sample(0, 1.0, length=4), tiny.sample(1, -1.0, length=6)]
    for _ in range(150):
        values = [np.asarray(critic.values(batch([sample])))[0, : len(sample.token_ids)] for sample in samples]
        taught = critic.credited(samples, values, ADVANTAGE)
        critic.accumulate(batch(taught))
        critic.update()
        measured = critic.end_step()
    assert measured["value_loss"] < 0.02
    for sample, reward in zip(samples, (1.0, -1.0), strict=True):
        values = np.asarray(critic.values(batch([sample])))[0, : len(sample.token_ids)]
        np.testing.assert_allclose(values[sample.action_mask], reward, atol=0.3)


def test_a_policy_trains_with_it(critic: Critic):
    subject = tiny.policy(tiny.learner(), advantage=ADVANTAGE, critic=critic)
    before = jax.device_get(subject.state.parameters)
    values = jax.device_get(critic.state.parameters)
    subject.add([tiny.group(0), tiny.group(1)], Stopwatch())
    subject.update(Stopwatch())
    measured = subject.end_step(1)
    # Values are 0, so advantages are the rewards, normalised: of 8 tokens four 1, four 0.
    assert measured["value_loss"] == pytest.approx(0.25)
    assert measured["tokens"] == 8
    changed = [not np.array_equal(before[name], value) for name, value in subject.state.parameters.items()]
    assert any(changed)
    assert not np.array_equal(values[HEAD], critic.state.parameters[HEAD])
