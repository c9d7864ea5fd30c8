"""Advantages from the rewards of a group."""

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
    raise NotImplementedError
