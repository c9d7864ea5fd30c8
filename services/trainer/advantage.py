"""Advantages from rewards. Pure: numbers in, numbers out.

Shapes: G trajectories of a group, K turns of one, T tokens of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

OutcomeEstimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]

_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], estimator: OutcomeEstimator = "grpo") -> np.ndarray:
    """One advantage for each trajectory, from their rewards.

        grpo                    (r_i - mean(r)) / (std(r) + 1e-6), std with ddof 1
                                https://arxiv.org/abs/2402.03300, section 4.1.2
        dr_grpo                 r_i - mean(r)               https://arxiv.org/abs/2503.20783, section 3.2
        rloo                    r_i - mean of the others    https://arxiv.org/abs/2402.14740, section 3.3
        reinforce_pp            r_i                         https://arxiv.org/abs/2501.03262; `normalise` comes after
        reinforce_pp_baseline   r_i - mean(r)               the same, with the group's baseline

    Args:
        rewards: [G], of one task's episodes.

    Returns:
        float32[G]; with a baseline exactly 0 when all rewards are equal.

    Raises:
        ValueError: fewer than two rewards, or one that is not finite.
    """
    values = np.asarray(rewards, np.float64)
    if values.size < 2:
        raise ValueError(f"a group of {values.size} has no advantages: there is nothing to compare with")
    if not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite, but they are {values.tolist()}")
    if estimator == "reinforce_pp":
        return values.astype(np.float32)
    # The mean of equal numbers need not equal them in floating point, and its rounding error would be blown up.
    if (values == values[0]).all():
        return np.zeros(values.size, np.float32)
    centred = values - values.mean()
    if estimator == "grpo":
        centred /= values.std(ddof=1) + _EPSILON
    elif estimator == "rloo":
        centred *= values.size / (values.size - 1)
    return centred.astype(np.float32)


def turn_advantages(
    rewards: Sequence[np.ndarray], estimator: Literal["grpo", "dr_grpo"], *, discount: float = 1.0
) -> list[np.ndarray]:
    """One advantage for each turn: its own and the later turns' rewards, each compared with all turns of the group.

    A_ik = sum over j >= k of discount^(j - k) (r_ij - mean(R)) / (std(R) + 1e-6), R all rewards of the group; dr_grpo
    leaves the division out. Process supervision, https://arxiv.org/abs/2402.03300, section 4.1.3

    Args:
        rewards: G arrays [K], the K may differ.

    Returns:
        G arrays float32[K].

    Raises:
        ValueError: fewer than two trajectories, or a reward that is not finite.
    """
    everything = np.concatenate([np.asarray(of_one, np.float64) for of_one in rewards]) if rewards else np.empty(0)
    if len(rewards) < 2:
        raise ValueError(f"a group of {len(rewards)} has no advantages: there is nothing to compare with")
    if not np.isfinite(everything).all():
        raise ValueError("rewards must be finite")
    if (everything == everything[0]).all():
        return [np.zeros(len(of_one), np.float32) for of_one in rewards]
    scale = everything.std(ddof=1) + _EPSILON if estimator == "grpo" else 1.0
    return [_to_go((of_one - everything.mean()) / scale, discount).astype(np.float32) for of_one in rewards]


def generalised_advantages(
    rewards_T: np.ndarray,
    values_T: np.ndarray,
    mask_T: np.ndarray,
    ends_T: np.ndarray,
    *,
    discount: float = 1.0,
    trace: float = 0.95,
) -> tuple[np.ndarray, np.ndarray]:
    """GAE over the action tokens of one trajectory; what lies between them is no step. Beyond the last the value is 0.

    delta_t = r_t + g V_t+1 - V_t;  A_t = delta_t + g trace A_t+1;  return_t = A_t + V_t;  g is `discount` from a
    turn to the next and 1 within a turn. https://arxiv.org/abs/1506.02438, equation 16

    Args:
        values_T: before each token was sampled.
        mask_T: True at action tokens.
        ends_T: True at the last action token of a turn.
        trace: lambda.

    Returns:
        advantages_T and returns_T, float32, 0 outside actions.
    """
    advantages_T, returns_T = np.zeros(len(mask_T), np.float32), np.zeros(len(mask_T), np.float32)
    advantage = next_value = 0.0
    for t in np.flatnonzero(mask_T)[::-1]:
        decay = discount if ends_T[t] else 1.0
        delta = rewards_T[t] + decay * next_value - values_T[t]
        advantage = delta + decay * trace * advantage
        next_value = values_T[t]
        advantages_T[t], returns_T[t] = advantage, advantage + values_T[t]
    return advantages_T, returns_T


def normalise(advantages: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(A - mean) / (std + 1e-6) over all masked tokens of a minibatch, std with ddof 1; 0 outside and of equal numbers.

    https://arxiv.org/abs/2501.03262, the global normalisation of REINFORCE++
    """
    chosen = np.concatenate([np.empty(0), *(a[mask] for a, mask in zip(advantages, masks, strict=True))])
    if not chosen.size or (chosen == chosen[0]).all():
        return [np.zeros(len(mask), np.float32) for mask in masks]
    mean, scale = chosen.mean(), chosen.std(ddof=1) + _EPSILON
    return [np.where(mask, (a - mean) / scale, 0).astype(np.float32) for a, mask in zip(advantages, masks, strict=True)]


def overlong_penalty(tokens: int, *, limit: int, buffer: int, penalty: float) -> float:
    """What a long episode's reward loses: nothing up to limit - buffer, then evenly more, `penalty` at the limit.

    Soft overlong punishment, https://arxiv.org/abs/2503.14476, equation 13, in tokens
    """
    if not buffer:
        return 0.0
    return penalty * min(max(tokens - (limit - buffer), 0) / buffer, 1.0)


def _to_go(rewards_K: np.ndarray, discount: float) -> np.ndarray:
    sums = np.zeros(len(rewards_K))
    total = 0.0
    for k in range(len(rewards_K) - 1, -1, -1):
        total = rewards_K[k] + discount * total
        sums[k] = total
    return sums
