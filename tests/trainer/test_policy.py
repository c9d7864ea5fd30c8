"""services.trainer.policy: how groups arrive does not change what is learned."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from headrace import config
from services.trainer.packing import pack
from services.trainer.stopwatch import Stopwatch
from tests.trainer import tiny


def train(subject, portions):
    """One step from samples that arrive in portions; its parameters and measurements."""
    for portion in portions:
        subject.add(portion, Stopwatch())
    subject.update(Stopwatch())
    return jax.device_get(subject.state.parameters), subject.end_step()


GROUPS = [tiny.group(number) for number in range(6)]


def test_a_step_does_not_depend_on_how_its_groups_arrived():
    learner = tiny.learner()
    whole, measured = train(tiny.policy(learner), [GROUPS])
    split, measured_split = train(tiny.policy(learner), [GROUPS[:1], GROUPS[1:4], [], GROUPS[4:]])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), whole, split)
    assert measured["tokens"] == measured_split["tokens"] == 24
    assert measured["loss"] == pytest.approx(measured_split["loss"], abs=1e-5)


def test_it_knows_whether_a_step_has_begun_to_change_it():
    subject = tiny.policy(tiny.learner(), minibatches=2)
    subject.add(GROUPS, Stopwatch())
    assert subject.between_steps
    subject.update(Stopwatch())
    assert not subject.between_steps
    subject.update(Stopwatch())
    assert subject.end_step()["skipped_updates"] == 1  # the second minibatch was empty
    assert subject.between_steps


def test_the_ratio_is_measured_from_the_start_of_the_step():
    loss = config.Loss(anchor="start", correction="token_tis")
    subject = tiny.policy(tiny.learner(minibatches=2, loss=loss), minibatches=2)
    for _ in range(2):
        subject.add(GROUPS, Stopwatch())
        subject.update(Stopwatch())
    assert subject.end_step()["ratio_max"] > 1  # the second minibatch met a policy that the first had moved


def test_a_reference_stays_what_it_is():
    loss = config.Loss(kl_coefficient=0.1)
    fresh = tiny.policy(tiny.learner())
    reference = fresh.state.parameters
    subject = tiny.policy(tiny.learner(loss=loss), reference=reference)
    assert train(subject, [GROUPS])[1]["reference_kl"] == pytest.approx(0, abs=1e-6)
    assert train(subject, [GROUPS])[1]["reference_kl"] > 0


def test_an_estimator_over_the_minibatch_does_not_depend_on_how_groups_arrived():
    options = {"advantage": config.Advantage(estimator="reinforce_pp")}
    learner = tiny.learner()
    whole, _ = train(tiny.policy(learner, **options), [GROUPS])
    split, _ = train(tiny.policy(learner, **options), [GROUPS[:1], GROUPS[1:4], GROUPS[4:]])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), whole, split)


def test_a_divergence_is_taken_off_the_reward():
    """Equal rewards: what is left to tell the trajectories apart is how far each is from the reference."""
    loss = config.Loss(kl_coefficient=0.5, kl_estimator="k1", kl_place="reward")
    learner = tiny.learner(loss=loss)
    fresh = tiny.policy(learner)
    group = tiny.group(0, (1.0, 1.0))
    subject = tiny.policy(learner, reference=fresh.state.parameters)
    (microbatch,) = pack(group.samples, max_row_tokens=tiny.ROW_TOKENS, buckets=(2,))
    scores = np.asarray(learner.logprobs(fresh.state.parameters, microbatch))
    gaps = np.where(microbatch.action_mask_BT, microbatch.behaviour_logprobs_BT - scores, 0)
    _, measured = train(subject, [[group]])
    assert measured["gradient_norm"] > 0
    assert measured["reference_kl"] == pytest.approx(gaps.sum() / 4, rel=1e-4)
    assert train(tiny.policy(tiny.learner()), [[group]])[1]["gradient_norm"] == 0


def test_a_reference_moves_when_config_says_so():
    loss = config.Loss(kl_coefficient=0.1, kl_reference_steps=2)
    reference = tiny.policy(tiny.learner()).state.parameters
    subject = tiny.policy(tiny.learner(loss=loss), reference=reference)
    seen = []
    for step in (1, 2, 3):
        subject.add(GROUPS, Stopwatch())
        subject.update(Stopwatch())
        seen.append(subject.end_step(step)["reference_kl"])
    assert seen[0] == pytest.approx(0, abs=1e-7)
    assert seen[1] > 1e-6
    assert seen[2] == pytest.approx(0, abs=1e-7)  # the policy of step 2 is what step 3 begins with


def test_an_interpolated_start_costs_no_forward_pass_and_follows_the_updates():
    loss = config.Loss(anchor="interpolated")
    aged = [replace(group, samples=tuple(replace(s, ages=1) for s in group.samples)) for group in GROUPS]
    subject = tiny.policy(tiny.learner(minibatches=2, loss=loss), minibatches=2)
    compiled = tiny.learner(minibatches=2, loss=loss).compilations
    subject.add(aged, Stopwatch())
    subject.update(Stopwatch())
    subject.add(aged, Stopwatch())
    subject.update(Stopwatch())
    measured = subject.end_step(1)
    assert tiny.learner(minibatches=2, loss=loss).compilations == compiled + 2  # for two buckets; none for logprobs
    assert measured["ratio_max"] > 1
