"""services.trainer.policy: how groups arrive does not change what is learned."""

import jax
import numpy as np
import pytest

from headrace import config
from services.trainer.stopwatch import Stopwatch
from tests.trainer import tiny


def train(subject, portions):
    """One step from samples that arrive in portions; its parameters and measurements."""
    for portion in portions:
        subject.add(portion, Stopwatch())
    subject.update(Stopwatch())
    return jax.device_get(subject.state.parameters), subject.end_step()


SAMPLES = [tiny.sample(number, advantage=1.0 if number % 2 else -0.5, length=4 + number % 3) for number in range(12)]


def test_a_step_does_not_depend_on_how_its_groups_arrived():
    learner = tiny.learner()
    whole, measured = train(tiny.policy(learner), [SAMPLES])
    split, measured_split = train(tiny.policy(learner), [SAMPLES[:1], SAMPLES[1:7], [], SAMPLES[7:]])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), whole, split)
    assert measured["tokens"] == measured_split["tokens"] == 24
    assert measured["loss"] == pytest.approx(measured_split["loss"], abs=1e-5)


def test_it_knows_whether_a_step_has_begun_to_change_it():
    subject = tiny.policy(tiny.learner(), minibatches=2)
    subject.add(SAMPLES, Stopwatch())
    assert subject.between_steps
    subject.update(Stopwatch())
    assert not subject.between_steps
    subject.update(Stopwatch())
    assert subject.end_step()["skipped_updates"] == 1  # the second minibatch was empty
    assert subject.between_steps


def test_token_tis_measures_from_the_start_of_the_step():
    loss = config.Loss(correction="token_tis")
    subject = tiny.policy(tiny.learner(minibatches=2, loss=loss), minibatches=2, proximal=True)
    for _ in range(2):
        subject.add(SAMPLES, Stopwatch())
        subject.update(Stopwatch())
    assert subject.end_step()["ratio_max"] > 1  # the second minibatch met a policy that the first had moved


def test_a_reference_stays_what_it_is():
    loss = config.Loss(kl_coefficient=0.1)
    fresh = tiny.policy(tiny.learner())
    reference = fresh.state.parameters
    subject = tiny.policy(tiny.learner(loss=loss), reference=reference)
    assert train(subject, [SAMPLES])[1]["reference_kl"] == pytest.approx(0, abs=1e-6)
    assert train(subject, [SAMPLES])[1]["reference_kl"] > 0
