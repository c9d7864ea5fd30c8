"""Advantages from the rewards of a group. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def group_advantages(rewards: Sequence[float]) -> np.ndarray:
    """GRPO: A_i = (r_i - mean(r)) / (std(r) + 1e-6), std with ddof 1. https://arxiv.org/abs/2402.03300, section 4.1.2

    Args:
        rewards: [G], of one task's episodes.

    Returns:
        float32[G]; exactly 0 when all rewards are equal.

    Raises:
        ValueError: fewer than two rewards, or one that is not finite.
    """
    values = np.asarray(rewards, np.float64)
    if values.size < 2:
        raise ValueError(f"a group of {values.size} has no advantages: there is nothing to compare with")
    if not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite, but they are {values.tolist()}")
    # The mean of equal numbers need not equal them in floating point, and its rounding error would be blown up.
    if (values == values[0]).all():
        return np.zeros(values.size, np.float32)
    return ((values - values.mean()) / (values.std(ddof=1) + 1e-6)).astype(np.float32)
