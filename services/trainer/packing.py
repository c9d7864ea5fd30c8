"""Trajectories in, microbatches of static shape out.

Shapes: T tokens of a trajectory; microbatch arrays are [B rows, R row tokens] and carry the suffix _BT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sample:
    """A trajectory as the loss sees it."""

    trajectory_id: str
    token_ids: np.ndarray  # int32[T], observations and actions in order
    action_mask: np.ndarray  # bool[T], True where the policy sampled the token; never at T = 0
    behaviour_logprobs: np.ndarray  # float32[T], of the token at the same place; anything, also NaN, where masked
    versions: np.ndarray  # int64[T], policy_version that sampled the token; anything where masked
    advantage: float = 0.0  # of every action token; unused by supervised training


@dataclass(frozen=True)
class Microbatch:
    """Rows of packed trajectories; padding has segment 0. NumPy on the host; the step moves it."""

    tokens_BT: np.ndarray  # int32
    positions_BT: np.ndarray  # int32, from 0 within each segment
    segment_ids_BT: np.ndarray  # int32, from 1 within each row, 0 is padding
    action_mask_BT: np.ndarray  # bool
    behaviour_logprobs_BT: np.ndarray  # float32
    advantages_BT: np.ndarray  # float32, 0 outside actions

    @property
    def action_tokens(self) -> int:
        """Tokens that enter the loss."""
        return int(self.action_mask_BT.sum())

    @property
    def padding_fraction(self) -> float:
        """Share of the tokens that are padding."""
        return float((self.segment_ids_BT == 0).mean())


def row_buckets(microbatch_tokens: int, max_row_tokens: int, multiple_of: int = 1) -> tuple[int, ...]:
    """The numbers of rows that a microbatch may have, ascending: multiple_of times powers of two, and the largest.

    Args:
        multiple_of: size of the mesh axis that rows are sharded over.

    Raises:
        ValueError: not even `multiple_of` rows fit.
    """
    raise NotImplementedError


def pack(samples: Sequence[Sample], *, max_row_tokens: int, buckets: tuple[int, ...]) -> list[Microbatch]:
    """Packs trajectories first-fit, longest first, into rows and rows into microbatches.

    All microbatches but the last have buckets[-1] rows; the last has the smallest bucket that holds what is left. The
    same samples give the same microbatches in any order of calls; no samples give none.

    Raises:
        ValueError: a trajectory is longer than a row, has arrays of unequal length, or samples its first token.
    """
    raise NotImplementedError
