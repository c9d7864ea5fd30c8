"""What the train step measures: sums and maxima on the device, means of them for people."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """Over action tokens, each float32[] on the device: fields that end in _max are maxima, all others sums.

    pi is the policy that is trained, mu the sampler; "start" is pi at the start of the step where the loss has its
    logprobs or an estimate of them (anchor), else pi itself.
    """

    tokens: jax.Array  # number of action tokens
    denominator: jax.Array  # what the loss is divided by, as its aggregation has it
    loss: jax.Array  # the whole loss
    entropy: jax.Array  # of pi, nats
    clipped_low: jax.Array  # tokens whose ratio met the lower clip
    clipped_high: jax.Array  # tokens whose ratio met the upper clip
    ratio: jax.Array  # of the clipped loss
    ratio_max: jax.Array
    sampler_gap: jax.Array  # |log start - log mu|: the disagreement of trainer and sampler, plus staleness
    sampler_gap_max: jax.Array
    sampler_kl: jax.Array  # k3 estimate of KL(mu || pi)
    importance: jax.Array  # pi / mu
    importance_squared: jax.Array
    correction_weight: jax.Array  # what the off-policy correction multiplies the loss with; 1 without one
    rejected: jax.Array  # tokens that it takes out of the loss
    reference_kl: jax.Array  # estimate of KL(pi || reference); 0 without a reference

    @staticmethod
    def zeros() -> Metrics:
        """Of no tokens."""
        return Metrics(**{field.name: jnp.zeros((), jnp.float32) for field in dataclasses.fields(Metrics)})

    def replace(self, **changes: jax.Array) -> Metrics:
        """The same with other values."""
        return dataclasses.replace(self, **changes)

    def summary(self) -> dict[str, float]:
        """Means, fractions and maxima by name, for people. Waits for the device: call it once a step."""
        values: Metrics = jax.device_get(self)
        tokens = max(float(values.tokens), 1.0)
        named = {
            field.name: float(getattr(values, field.name)) / (1.0 if field.name.endswith("_max") else tokens)
            for field in dataclasses.fields(self)
        }
        named["loss"] = float(values.loss) / max(float(values.denominator), 1.0)
        # Effective sample size as a share of the tokens: (sum w)^2 / (n sum w^2).
        squared = named.pop("importance_squared")
        named["effective_sample_fraction"] = named["importance"] ** 2 / squared if squared else 0.0
        del named["denominator"]
        return {**named, "tokens": float(values.tokens)}


def merge(left: Metrics, right: Metrics) -> Metrics:
    """Metrics of the tokens of both; stays on the device."""
    merged = {}
    for field in dataclasses.fields(Metrics):
        pair = getattr(left, field.name), getattr(right, field.name)
        merged[field.name] = jnp.maximum(*pair) if field.name.endswith("_max") else pair[0] + pair[1]
    return Metrics(**merged)
