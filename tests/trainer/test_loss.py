"""Losses against numbers worked out by hand, and against the same formulas in NumPy loops."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace import config
from services.trainer.correction import token_tis
from services.trainer.divergence import divergence
from services.trainer.loss import LossInputs, policy_loss
from services.trainer.objective import ppo
from tests.trainer import numpy_loss
from tests.trainer.numpy_loss import Trajectory

LOG_2 = float(np.log(2))


def test_clips_each_side_with_its_own_bound():
    # Ratios 2, 2, 0.5, 0.5, 1.1 with bounds 0.8 and 1.28: a clip holds only where it makes the loss larger.
    logprobs = jnp.array([LOG_2, LOG_2, -LOG_2, -LOG_2, np.log(1.1)])
    advantages = jnp.array([1.0, -1.0, 1.0, -1.0, 3.0])
    losses, ratios = ppo(logprobs, jnp.zeros(5), advantages, clip_low=0.2, clip_high=0.28)
    np.testing.assert_allclose(ratios, [2, 2, 0.5, 0.5, 1.1], rtol=1e-6)
    np.testing.assert_allclose(losses, [-1.28, 2, -0.5, 0.8, -3.3], rtol=1e-6)


def test_clipped_tokens_have_no_gradient():
    def total(logprobs: jax.Array) -> jax.Array:
        return ppo(logprobs, jnp.zeros(4), jnp.array([1.0, -1.0, 1.0, -1.0]), clip_low=0.2, clip_high=0.28)[0].sum()

    # The derivative of -A r is -A r.
    np.testing.assert_allclose(jax.grad(total)(jnp.array([LOG_2, LOG_2, -LOG_2, -LOG_2])), [0, 2, -0.5, 0], rtol=1e-6)


def test_dual_clip_limits_what_a_negative_advantage_weighs():
    logprobs, advantages = jnp.array([2 * LOG_2, 2 * LOG_2, LOG_2]), jnp.array([-1.0, 1.0, -1.0])
    losses, _ = ppo(logprobs, jnp.zeros(3), advantages, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    np.testing.assert_allclose(losses, [3, -1.28, 2], rtol=1e-6)  # without it 4, -1.28, 2


def test_importance_weights_are_capped():
    log_weights = jnp.array([-np.log(4), np.log(1.5), np.log(8)])
    np.testing.assert_allclose(token_tis(log_weights, cap=2.0), [0.25, 1.5, 2], rtol=1e-6)


def test_divergences_by_hand():
    # d = -log 2: k3 is 2 - log 2 - 1. d = log 2: 1/2 + log 2 - 1.
    pairs = jnp.array([0.0, 0.0, -1.0]), jnp.array([LOG_2, -LOG_2, -1.0])
    np.testing.assert_allclose(divergence(*pairs, "k1"), [-LOG_2, LOG_2, 0], rtol=1e-6)
    np.testing.assert_allclose(divergence(*pairs, "k2"), [LOG_2**2 / 2, LOG_2**2 / 2, 0], rtol=1e-6)
    np.testing.assert_allclose(divergence(*pairs, "k3"), [1 - LOG_2, LOG_2 - 0.5, 0], rtol=1e-6)


def test_k1_as_a_loss_would_do_nothing_and_is_refused():
    """Its expected gradient under pi is zero; that of k2 is the divergence's. tunix.md measured the same."""
    logits, reference = jnp.array([0.3, -0.2, 0.9]), jax.nn.log_softmax(jnp.array([1.0, 0.0, -0.5]))

    def expected(estimator: str):
        def loss(x: jax.Array) -> jax.Array:
            logprobs = jax.nn.log_softmax(x)
            return jnp.sum(jax.nn.softmax(logits) * divergence(logprobs, reference, estimator))

        return jax.grad(loss)(logits)

    def exact(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - reference))

    np.testing.assert_allclose(expected("k1"), np.zeros(3), atol=1e-7)
    np.testing.assert_allclose(expected("k2"), jax.grad(exact)(logits), atol=1e-6)
    with pytest.raises(ValueError, match="gradient of zero in expectation"):
        config.Loss(kl_coefficient=0.1, kl_estimator="k1")
    config.Loss(kl_coefficient=0.1, kl_estimator="k1", kl_place="reward")


def sum_of(settings: config.Loss, logprobs=None, entropies=None, **changes: object):
    """`policy_loss` of two tokens and a masked one."""
    inputs = LossInputs(
        mask=jnp.array([[True, True, False]]),
        segment_ids=jnp.array([[1, 1, 1]]),
        behaviour_logprobs=jnp.array([[-1.0, -2.0 - LOG_2, 0.0]]),
        advantages=jnp.array([[1.0, -1.0, 5.0]]),
        ages=jnp.zeros((1, 3)),
    )
    logprobs = jnp.array([[-1.0, -2.0, -3.0]]) if logprobs is None else logprobs
    entropies = jnp.array([[0.5, 0.25, 9.0]]) if entropies is None else entropies
    return policy_loss(logprobs, entropies, replace(inputs, **changes), settings)


def test_is_a_sum_over_action_tokens():
    loss, metrics = sum_of(config.Loss())
    # Ratios 1 and 2 with advantages 1 and -1.
    assert float(loss) == pytest.approx(-1 + 2, rel=1e-6)
    assert float(metrics.tokens) == float(metrics.denominator) == 2
    summary = metrics.summary()
    assert summary["loss"] == pytest.approx(0.5)
    assert summary["ratio"] == pytest.approx(1.5)
    assert summary["ratio_max"] == pytest.approx(2)
    assert summary["entropy"] == pytest.approx(0.375)
    assert summary["sampler_gap"] == pytest.approx(LOG_2 / 2)
    assert summary["sampler_gap_max"] == pytest.approx(LOG_2)
    # Importance weights 1 and 2: (1 + 2)^2 / (2 (1 + 4)).
    assert summary["effective_sample_fraction"] == pytest.approx(0.9)
    # d = log 2 at the second token.
    assert summary["sampler_kl"] == pytest.approx((1 - LOG_2) / 2)
    assert summary["clipped_low"] == summary["clipped_high"] == summary["rejected"] == 0


def test_counts_the_tokens_that_each_clip_held():
    summary = sum_of(config.Loss(), advantages=jnp.array([[1.0, 1.0, 5.0]]))[1].summary()
    assert (summary["clipped_low"], summary["clipped_high"]) == (0, 0.5)
    halved = jnp.array([[-1.0, -2.0 + LOG_2, 0.0]])
    summary = sum_of(config.Loss(), behaviour_logprobs=halved)[1].summary()
    assert (summary["clipped_low"], summary["clipped_high"]) == (0.5, 0)


def test_entropy_and_divergence_enter_with_their_coefficients():
    settings = config.Loss(entropy_coefficient=0.1, kl_coefficient=0.5)
    loss, metrics = sum_of(settings, reference_logprobs=jnp.array([[-1.0 + LOG_2, -2.0, jnp.nan]]))
    assert float(loss) == pytest.approx(1 - 0.1 * 0.75 + 0.5 * (1 - LOG_2), rel=1e-5)
    assert float(metrics.reference_kl) == pytest.approx(1 - LOG_2, rel=1e-5)


def test_token_tis_anchors_at_the_start_of_the_step_and_weighs_by_it():
    # The start is pi itself: ratios are 1; weights are exp(0) and min(exp(log 2), 1.5).
    settings = config.Loss(anchor="start", correction="token_tis", correction_cap=1.5)
    loss, metrics = sum_of(settings, start_logprobs=jnp.array([[-1.0, -2.0, jnp.nan]]))
    assert float(loss) == pytest.approx(-1 + 1.5, rel=1e-6)
    summary = metrics.summary()
    assert summary["ratio_max"] == pytest.approx(1)
    assert summary["correction_weight"] == pytest.approx(1.25)


def test_a_correction_needs_another_anchor_than_the_sampler():
    with pytest.raises(ValueError, match="needs anchor: start or interpolated"):
        config.Loss(correction="token_tis")


@pytest.mark.parametrize("poison", [np.nan, -np.inf, np.inf])
def test_masked_poison_reaches_neither_loss_nor_gradient(poison: float):
    settings = config.Loss(
        anchor="start",
        correction="sequence_tis",
        geometric_bounds=(0.1, 10),
        veto_bounds=(1e-3, 100),
        aggregation="sequence_mean_token_mean",
        kl_coefficient=0.1,
        entropy_coefficient=0.1,
    )
    poisoned = jnp.array([[-1.0, -2.0, poison]])

    def loss(logprobs_BT: jax.Array, entropies_BT: jax.Array) -> jax.Array:
        return sum_of(
            settings,
            logprobs_BT,
            entropies_BT,
            behaviour_logprobs=poisoned,
            advantages=poisoned,
            ages=poisoned,
            start_logprobs=poisoned,
            reference_logprobs=poisoned,
        )[0]

    value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(poisoned, poisoned)
    assert np.isfinite(value)
    assert np.isfinite(gradients).all()
    assert gradients[0][0, 2] == gradients[1][0, 2] == 0


@pytest.mark.parametrize("objective", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("log_ratio", [50.0, -50.0, 200.0])
def test_huge_ratios_stay_finite(log_ratio: float, objective: str):
    settings = config.Loss(objective=objective, kl_coefficient=0.1)
    other = jnp.array([[-1.0 - log_ratio, -2.0 - log_ratio, 0.0]])

    def loss(logprobs_BT: jax.Array) -> jax.Array:
        return sum_of(settings, logprobs_BT, behaviour_logprobs=other, reference_logprobs=other)

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.array([[-1.0, -2.0, -3.0]]))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert np.isfinite(jax.tree.leaves(metrics)).all()
    assert float(metrics.ratio_max) == pytest.approx(np.exp(np.clip(log_ratio, -20, 20)), rel=1e-5)


def test_nothing_but_masked_tokens_gives_zero():
    loss, metrics = sum_of(config.Loss(), mask=jnp.zeros((1, 3), bool))
    assert float(loss) == 0
    assert set(metrics.summary().values()) == {0.0}


LENGTHS = [3, 5, 2, 6, 4]


def trajectories(seed: int = 0) -> list[Trajectory]:
    """Far enough from each other that every clip, cap and bound below is met by some token."""
    rng = np.random.default_rng(seed)
    made = []
    for length in LENGTHS:
        behaviour = rng.normal(-2, 0.5, length)
        start = behaviour + rng.normal(0, 0.4, length)
        logprobs = start + rng.normal(0, 0.3, length)
        made.append(
            Trajectory(
                logprobs=logprobs,
                entropies=rng.uniform(0, 2, length),
                behaviour=behaviour,
                start=start,
                reference=logprobs + rng.normal(0, 0.3, length),
                advantages=np.full(length, rng.normal()),
                ages=rng.integers(0, 3, length).astype(float),
            )
        )
    return made


def packed(values: list[np.ndarray], fill: float = np.nan) -> jax.Array:
    """Two rows of trajectories, each after one token of observation; what is no action is poison."""
    rows = np.full((2, 16), fill)
    for row, chosen in enumerate(([0, 1, 2], [3, 4])):
        start = 0
        for number in chosen:
            rows[row, start + 1 : start + 1 + LENGTHS[number]] = values[number]
            start += 1 + LENGTHS[number]
    return jnp.asarray(rows)


def segments() -> jax.Array:
    rows = np.zeros((2, 16), np.int32)
    for row, chosen in enumerate(([0, 1, 2], [3, 4])):
        start = 0
        for segment, number in enumerate(chosen, start=1):
            rows[row, start : start + 1 + LENGTHS[number]] = segment
            start += 1 + LENGTHS[number]
    return jnp.asarray(rows)


FAMILY = [
    config.Loss(),
    config.Loss(objective="ppo", dual_clip=1.5, entropy_coefficient=0.1),
    config.Loss(objective="gspo", clip_low=0.05, clip_high=0.1, aggregation="sequence_mean_token_mean"),
    config.Loss(objective="gspo", anchor="start", clip_low=0.05, clip_high=0.1, correction="sequence_tis"),
    config.Loss(objective="cispo", aggregation="token_mean"),
    config.Loss(objective="cispo", anchor="start", correction="token_tis", correction_cap=1.2),
    config.Loss(anchor="start"),
    config.Loss(anchor="start", correction="token_tis", correction_cap=1.2, kl_coefficient=0.3),
    config.Loss(anchor="start", correction="sequence_tis", correction_cap=1.5),
    config.Loss(anchor="start", correction="icepop", icepop_bounds=(0.7, 1.4)),
    config.Loss(anchor="interpolated"),
    config.Loss(anchor="interpolated", correction="token_tis", correction_cap=1.2),
    config.Loss(geometric_bounds=(0.7, 1.3)),
    config.Loss(anchor="start", geometric_bounds=(0.85, 1.15), aggregation="sequence_mean_token_mean"),
    config.Loss(anchor="start", veto_bounds=(0.5, 1.9), aggregation="sequence_mean_token_sum"),
    config.Loss(aggregation="sequence_mean_token_sum", kl_coefficient=0.2, kl_estimator="k2"),
    config.Loss(aggregation="sequence_mean_constant", aggregation_tokens=10, entropy_coefficient=0.05),
]


@pytest.mark.parametrize("settings", FAMILY, ids=lambda s: f"{s.objective}-{s.anchor}-{s.correction}-{s.aggregation}")
def test_agrees_with_numpy_in_value_and_gradient(settings: config.Loss):
    made, progress = trajectories(), 0.5
    mask = np.isfinite(packed([one.logprobs for one in made]))
    inputs = LossInputs(
        mask=jnp.asarray(mask),
        segment_ids=segments(),
        advantages=packed([one.advantages for one in made]),
        behaviour_logprobs=packed([one.behaviour for one in made]),
        ages=packed([one.ages for one in made]),
        start_logprobs=packed([one.start for one in made]),
        reference_logprobs=packed([one.reference for one in made]),
        progress=progress,
    )
    entropies = packed([one.entropies for one in made])

    def mean(logprobs_BT: jax.Array) -> jax.Array:
        total, metrics = policy_loss(logprobs_BT, entropies, inputs, settings)
        return total / metrics.denominator

    value, gradient = jax.value_and_grad(mean)(packed([one.logprobs for one in made], fill=-1.0))
    assert float(value) == pytest.approx(numpy_loss.policy_loss(made, settings, progress=progress), rel=1e-4)
    frozen, numeric = [one.logprobs for one in made], []
    for number, one in enumerate(made):
        slopes = np.zeros(len(one.logprobs))
        for t in range(len(slopes)):
            shifted = []
            for shift in (1e-6, -1e-6):
                moved = one.logprobs.copy()
                moved[t] += shift
                near = [*made[:number], replace(one, logprobs=moved), *made[number + 1 :]]
                shifted.append(numpy_loss.policy_loss(near, settings, progress=progress, frozen=frozen))
            slopes[t] = (shifted[0] - shifted[1]) / 2e-6
        numeric.append(slopes)
    np.testing.assert_allclose(gradient, packed(numeric, fill=0.0), atol=2e-4)


def test_every_bound_of_the_family_is_met():
    """Or the comparison above would not tell a bound from none."""
    made = trajectories()
    for settings in FAMILY:
        plain = config.Loss(
            **settings.model_dump()
            | {
                "correction_cap": 1e9,
                "icepop_bounds": (1e-9, 1e9),
                "geometric_bounds": None,
                "veto_bounds": None,
                "clip_low": 1 - 1e-9,
                "clip_high": 1e9,
                "dual_clip": None,
            }
        )
        assert numpy_loss.policy_loss(made, settings, progress=0.5) != pytest.approx(
            numpy_loss.policy_loss(made, plain, progress=0.5), rel=1e-3
        ), settings


def test_an_interpolated_anchor_is_exact_at_its_ends():
    """A token of the step's own weights starts at the sampler; before any update the start is pi itself."""
    mixed = {"ages": jnp.array([[0.0, 2.0, 0.0]])}
    _, metrics = sum_of(config.Loss(anchor="interpolated"), **mixed, progress=0.0)
    assert metrics.summary()["ratio"] == pytest.approx(1)
    _, metrics = sum_of(config.Loss(anchor="interpolated"), ages=jnp.zeros((1, 3)), progress=0.5)
    assert metrics.summary()["ratio"] == pytest.approx(1.5)  # as with the sampler
