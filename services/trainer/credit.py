"""From the rewards of compared trajectories to the advantages of their tokens, as config says. Pure NumPy.

Shapes: T tokens of a trajectory, K turns with an action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace import config
from services.trainer.advantage import group_advantages, normalise, turn_advantages
from services.trainer.packing import Sample


@dataclass(frozen=True)
class Comparison:
    """The trajectories of one task that are compared, and which of them enter the loss."""

    samples: tuple[Sample, ...]
    kept: tuple[bool, ...]

    @property
    def kept_samples(self) -> tuple[Sample, ...]:
        """Those that enter the loss."""
        return tuple(sample for sample, kept in zip(self.samples, self.kept, strict=True) if kept)


def credited(comparisons: Sequence[Comparison], settings: config.Advantage) -> list[Sample]:
    """The kept samples with their advantages, of any estimator but gae.

    The reinforce_pp family normalises over all that is given, so give it a whole minibatch.
    """
    samples = [sample for comparison in comparisons for sample in _of_group(comparison, settings)]
    if not normalises(settings):
        return samples
    advantages = normalise([_by_token(s) for s in samples], [s.action_mask for s in samples])
    return [replace(sample, advantage=a) for sample, a in zip(samples, advantages, strict=True)]


def penalised(comparison: Comparison, divergences: Sequence[np.ndarray], *, coefficient: float) -> Comparison:
    """The same with the divergence at each action token, times the coefficient, taken off the reward there.

    Args:
        divergences: float32[T] for each sample, in nats; anything, also NaN, outside actions.
    """
    samples = (
        replace(sample, rewards=sample.rewards - coefficient * np.where(sample.action_mask, of_sample, 0))
        for sample, of_sample in zip(comparison.samples, divergences, strict=True)
    )
    return replace(comparison, samples=tuple(samples))


def normalises(settings: config.Advantage) -> bool:
    """Whether an advantage depends on the whole minibatch."""
    return settings.estimator in ("reinforce_pp", "reinforce_pp_baseline", "gae")


def turn_ends(sample: Sample) -> np.ndarray:
    """bool[T]: the last action token of each turn."""
    return sample.turn_ends if sample.turn_ends is not None else _ends_of_runs(sample.action_mask)


def _of_group(comparison: Comparison, settings: config.Advantage) -> list[Sample]:
    samples = comparison.samples
    if settings.credit == "turns":
        assert settings.estimator in ("grpo", "dr_grpo"), settings.estimator
        ends = [turn_ends(sample) for sample in samples]
        rewards = [_turn_rewards(sample, at) for sample, at in zip(samples, ends, strict=True)]
        by_turn = turn_advantages(rewards, settings.estimator, discount=settings.discount)
        given = [_spread(values, at) for values, at in zip(by_turn, ends, strict=True)]
    else:
        assert settings.estimator != "gae"
        totals = [float(np.sum(sample.rewards)) for sample in samples]
        given = list(group_advantages(totals, settings.estimator))
    credited = (replace(sample, advantage=value) for sample, value in zip(samples, given, strict=True))
    return [sample for sample, kept in zip(credited, comparison.kept, strict=True) if kept]


def _turn_rewards(sample: Sample, ends_T: np.ndarray) -> np.ndarray:
    """float64[K]: the rewards between one turn's end and the next."""
    sums = np.cumsum(np.broadcast_to(sample.rewards, ends_T.shape), dtype=np.float64)[ends_T]
    return np.diff(sums, prepend=0.0)


def _spread(values_K: np.ndarray, ends_T: np.ndarray) -> np.ndarray:
    """float32[T]: at each token the value of the turn that it belongs to."""
    turns_T = np.concatenate([[0], np.cumsum(ends_T)[:-1]])
    return values_K[np.minimum(turns_T, len(values_K) - 1)]


def _by_token(sample: Sample) -> np.ndarray:
    return np.where(sample.action_mask, sample.advantage, 0).astype(np.float32)


def _ends_of_runs(mask_T: np.ndarray) -> np.ndarray:
    return mask_T & ~np.append(mask_T[1:], False)
