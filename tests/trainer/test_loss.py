"""Losses against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace import config
from services.trainer.loss import clipped_policy_loss, k3_divergence, policy_loss, truncated_importance_weights

LOG_2 = float(np.log(2))


def test_clips_each_side_with_its_own_bound():
    # Ratios 2, 2, 0.5, 0.5, 1.1 with bounds 0.8 and 1.28: a clip holds only where it makes the loss larger.
    logprobs = jnp.array([LOG_2, LOG_2, -LOG_2, -LOG_2, np.log(1.1)])
    advantages = jnp.array([1.0, -1.0, 1.0, -1.0, 3.0])
    losses, ratios = clipped_policy_loss(logprobs, jnp.zeros(5), advantages, clip_low=0.2, clip_high=0.28)
    np.testing.assert_allclose(ratios, [2, 2, 0.5, 0.5, 1.1], rtol=1e-6)
    np.testing.assert_allclose(losses, [-1.28, 2, -0.5, 0.8, -3.3], rtol=1e-6)


def test_clipped_tokens_have_no_gradient():
    def total(logprobs: jax.Array) -> jax.Array:
        return clipped_policy_loss(
            logprobs, jnp.zeros(4), jnp.array([1.0, -1.0, 1.0, -1.0]), clip_low=0.2, clip_high=0.28
        )[0].sum()

    # The derivative of -A r is -A r.
    np.testing.assert_allclose(jax.grad(total)(jnp.array([LOG_2, LOG_2, -LOG_2, -LOG_2])), [0, 2, -0.5, 0], rtol=1e-6)


def test_importance_weights_are_capped_and_constant():
    logprobs, behaviour = jnp.array([0.0, 0.0, 0.0]), jnp.array([np.log(4), -np.log(1.5), -np.log(8)])
    np.testing.assert_allclose(truncated_importance_weights(logprobs, behaviour, cap=2.0), [0.25, 1.5, 2], rtol=1e-6)
    gradient = jax.grad(lambda x: truncated_importance_weights(x, behaviour, cap=2.0).sum())(logprobs)
    assert not gradient.any()


def test_k3_by_hand():
    # d = log 2: 2 - log 2 - 1. d = -log 2: 1/2 + log 2 - 1.
    divergences = k3_divergence(jnp.array([0.0, 0.0, -1.0]), jnp.array([LOG_2, -LOG_2, -1.0]))
    np.testing.assert_allclose(divergences, [1 - LOG_2, LOG_2 - 0.5, 0], rtol=1e-6)


def sum_of(settings: config.Loss, **changes: object):
    """`policy_loss` of two tokens and a masked one."""
    inputs = {
        "logprobs_BT": jnp.array([[-1.0, -2.0, -3.0]]),
        "entropies_BT": jnp.array([[0.5, 0.25, 9.0]]),
        "mask_BT": jnp.array([[True, True, False]]),
        "behaviour_logprobs_BT": jnp.array([[-1.0, -2.0 - LOG_2, 0.0]]),
        "advantages_BT": jnp.array([[1.0, -1.0, 5.0]]),
        "proximal_logprobs_BT": None,
        "reference_logprobs_BT": None,
        **changes,
    }
    names = ("logprobs_BT", "entropies_BT", "mask_BT")
    positional = [inputs.pop(name) for name in names]
    return policy_loss(*positional, **inputs, settings=settings)


def test_is_a_sum_over_action_tokens():
    loss, metrics = sum_of(config.Loss())
    # Ratios 1 and 2 with advantages 1 and -1.
    assert float(loss) == pytest.approx(-1 + 2, rel=1e-6)
    assert float(metrics.tokens) == 2
    summary = metrics.summary()
    assert summary["ratio"] == pytest.approx(1.5)
    assert summary["ratio_max"] == pytest.approx(2)
    assert summary["entropy"] == pytest.approx(0.375)
    assert summary["sampler_gap"] == pytest.approx(LOG_2 / 2)
    assert summary["sampler_gap_max"] == pytest.approx(LOG_2)
    # Importance weights 1 and 2: (1 + 2)^2 / (2 (1 + 4)).
    assert summary["effective_sample_fraction"] == pytest.approx(0.9)
    # d = log 2 at the second token.
    assert summary["sampler_kl"] == pytest.approx((1 - LOG_2) / 2)
    assert summary["clipped_low"] == summary["clipped_high"] == 0


def test_counts_the_tokens_that_each_clip_held():
    summary = sum_of(config.Loss(), advantages_BT=jnp.array([[1.0, 1.0, 5.0]]))[1].summary()
    assert (summary["clipped_low"], summary["clipped_high"]) == (0, 0.5)
    halved = jnp.array([[-1.0, -2.0 + LOG_2, 0.0]])
    summary = sum_of(config.Loss(), behaviour_logprobs_BT=halved)[1].summary()
    assert (summary["clipped_low"], summary["clipped_high"]) == (0.5, 0)


def test_entropy_and_divergence_enter_with_their_coefficients():
    settings = config.Loss(entropy_coefficient=0.1, kl_coefficient=0.5)
    loss, metrics = sum_of(settings, reference_logprobs_BT=jnp.array([[-1.0 + LOG_2, -2.0, jnp.nan]]))
    assert float(loss) == pytest.approx(1 - 0.1 * 0.75 + 0.5 * (1 - LOG_2), rel=1e-5)
    assert float(metrics.reference_kl) == pytest.approx(1 - LOG_2, rel=1e-5)


def test_token_tis_anchors_at_the_proximal_policy_and_weighs_by_it():
    # The proximal policy is pi itself: ratios are 1; weights are exp(0) and min(exp(log 2), 1.5).
    settings = config.Loss(correction="token_tis", tis_cap=1.5)
    loss, metrics = sum_of(settings, proximal_logprobs_BT=jnp.array([[-1.0, -2.0, jnp.nan]]))
    assert float(loss) == pytest.approx(-1 + 1.5, rel=1e-6)
    summary = metrics.summary()
    assert summary["ratio_max"] == pytest.approx(1)
    assert summary["tis_weight"] == pytest.approx(1.25)
    assert summary["tis_capped"] == pytest.approx(0.5)


@pytest.mark.parametrize("poison", [np.nan, -np.inf, np.inf])
def test_masked_poison_reaches_neither_loss_nor_gradient(poison: float):
    settings = config.Loss(correction="token_tis", kl_coefficient=0.1, entropy_coefficient=0.1)
    poisoned = jnp.array([[-1.0, -2.0, poison]])

    def loss(logprobs_BT: jax.Array, entropies_BT: jax.Array) -> jax.Array:
        return sum_of(
            settings,
            logprobs_BT=logprobs_BT,
            entropies_BT=entropies_BT,
            behaviour_logprobs_BT=poisoned,
            advantages_BT=poisoned,
            proximal_logprobs_BT=poisoned,
            reference_logprobs_BT=poisoned,
        )[0]

    value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(poisoned, poisoned)
    assert np.isfinite(value)
    assert np.isfinite(gradients).all()
    assert gradients[0][0, 2] == gradients[1][0, 2] == 0


@pytest.mark.parametrize("log_ratio", [50.0, -50.0, 200.0])
def test_huge_ratios_stay_finite(log_ratio: float):
    settings = config.Loss(kl_coefficient=0.1)
    other = jnp.array([[-1.0 - log_ratio, -2.0 - log_ratio, 0.0]])

    def loss(logprobs_BT: jax.Array) -> jax.Array:
        return sum_of(settings, logprobs_BT=logprobs_BT, behaviour_logprobs_BT=other, reference_logprobs_BT=other)

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.array([[-1.0, -2.0, -3.0]]))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert np.isfinite(jax.tree.leaves(metrics)).all()
    assert float(metrics.ratio_max) == pytest.approx(np.exp(np.clip(log_ratio, -20, 20)), rel=1e-5)


def test_nothing_but_masked_tokens_gives_zero():
    loss, metrics = sum_of(config.Loss(), mask_BT=jnp.zeros((1, 3), bool))
    assert float(loss) == 0
    assert set(metrics.summary().values()) == {0.0}
