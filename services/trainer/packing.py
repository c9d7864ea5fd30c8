"""Trajectories in, microbatches of static shape out. Pure NumPy.

A microbatch has one of a few numbers of rows, so that few programs are compiled.

Shapes: T tokens of a trajectory; microbatch arrays are [B rows, R tokens of a row] and carry the suffix _BT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Sample:
    """A trajectory as the loss sees it."""

    trajectory_id: str
    token_ids: np.ndarray  # int32[T], observations and actions in order
    action_mask: np.ndarray  # bool[T], True where the policy sampled the token; never at 0
    behaviour_logprobs: np.ndarray  # float32[T], of the token at the same place; anything, also NaN, where masked
    versions: np.ndarray  # int64[T], policy_version that sampled the token; anything where masked
    advantage: np.ndarray | float = 0.0  # float32[T], or of every action token; unused by supervised training
    ages: np.ndarray | int = 0  # int64[T], or of every action token: updates between its weights and the current ones
    rewards: np.ndarray | float = 0.0  # float64[T]: a turn's at its last action token; what the credit is made of
    turn_ends: np.ndarray | None = None  # bool[T]: last action token of each turn, masked ones too; None: of each run
    values: np.ndarray | float = 0.0  # float32[T], the critic's at the start of the step
    returns: np.ndarray | float = 0.0  # float32[T], what the critic is to learn


@dataclass(frozen=True)
class Microbatch:
    """Rows of packed trajectories; padding has segment 0. NumPy on the host; the step moves it."""

    tokens_BT: np.ndarray  # int32
    positions_BT: np.ndarray  # int32, from 0 within each segment
    segment_ids_BT: np.ndarray  # int32, from 1 within each row, 0 is padding
    action_mask_BT: np.ndarray  # bool
    behaviour_logprobs_BT: np.ndarray  # float32, of the token at the same place; anything outside actions
    advantages_BT: np.ndarray  # float32, 0 outside actions
    ages_BT: np.ndarray  # float32, 0 outside actions
    values_BT: np.ndarray  # float32, 0 outside actions
    returns_BT: np.ndarray  # float32, 0 outside actions

    @property
    def action_tokens(self) -> int:
        """Tokens that enter the loss."""
        return int(self.action_mask_BT.sum())

    @property
    def tokens(self) -> int:
        """Tokens that are no padding."""
        return int((self.segment_ids_BT > 0).sum())


def pack(samples: Sequence[Sample], *, max_row_tokens: int, buckets: Sequence[int]) -> list[Microbatch]:
    """Packs trajectories first-fit, longest first, into rows and rows into microbatches.

    Args:
        max_row_tokens: length of a row, which is the longest trajectory that fits.
        buckets: numbers of rows that a microbatch may have, ascending.

    Returns:
        Microbatches of buckets[-1] rows; the last has the smallest bucket that holds what is left. No samples, none.

    Raises:
        ValueError: a trajectory is longer than a row, has arrays of unequal length, or samples its first token.
    """
    return [microbatch for microbatch, _ in placed(samples, max_row_tokens=max_row_tokens, buckets=buckets)]


class Place(NamedTuple):
    """Where a sample lies in its microbatch."""

    sample: int
    row: int
    start: int


def placed(
    samples: Sequence[Sample], *, max_row_tokens: int, buckets: Sequence[int]
) -> list[tuple[Microbatch, list[Place]]]:
    """`pack`, and where each sample came to lie."""
    for sample in samples:
        _check(sample, max_row_tokens)
    order = sorted(range(len(samples)), key=lambda number: -len(samples[number].token_ids))
    rows = _first_fit(samples, order, max_row_tokens)
    most = buckets[-1]
    microbatches = []
    for start in range(0, len(rows), most):
        part = rows[start : start + most]
        size = next(size for size in buckets if size >= len(part))
        microbatches.append(_fill(samples, part, size, max_row_tokens))
    return microbatches


def row_buckets(microbatch_tokens: int, max_row_tokens: int, multiple_of: int = 1) -> tuple[int, ...]:
    """The numbers of rows that a microbatch may have: multiple_of times powers of two, and the most that fit.

    Args:
        microbatch_tokens: rows times max_row_tokens stay within it.
        multiple_of: parts that rows are split into over the mesh.

    Raises:
        ValueError: not even `multiple_of` rows fit.
    """
    most = microbatch_tokens // max_row_tokens // multiple_of
    if most < 1:
        raise ValueError(
            f"trainer.microbatch_tokens is {microbatch_tokens}, must be at least {multiple_of * max_row_tokens}:"
            f" {multiple_of} rows, one for each part of the mesh along data and fsdp, of {max_row_tokens} tokens"
        )
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return tuple(multiple_of * count for count in sorted({*powers, most}))


def _check(sample: Sample, row_tokens: int) -> None:
    length = len(sample.token_ids)
    if not 0 < length <= row_tokens:
        raise ValueError(f"trajectory {sample.trajectory_id} has {length} tokens, a row has 1 to {row_tokens}")
    if len(sample.action_mask) != length or len(sample.behaviour_logprobs) != length:
        raise ValueError(
            f"trajectory {sample.trajectory_id} has {length} tokens, but {len(sample.action_mask)} mask values and"
            f" {len(sample.behaviour_logprobs)} logprobs"
        )
    if sample.action_mask[0]:
        raise ValueError(f"trajectory {sample.trajectory_id} samples its first token: nothing predicts it")


def _first_fit(samples: Sequence[Sample], order: Sequence[int], row_tokens: int) -> list[list[int]]:
    free = np.full(len(order), row_tokens)
    rows: list[list[int]] = []
    for number in order:
        row = int(np.argmax(free >= len(samples[number].token_ids)))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        free[row] -= len(samples[number].token_ids)
    return rows


def _fill(
    samples: Sequence[Sample], rows: Sequence[Sequence[int]], size: int, row_tokens: int
) -> tuple[Microbatch, list[Place]]:
    shape = (size, row_tokens)
    microbatch = Microbatch(
        tokens_BT=np.zeros(shape, np.int32),
        positions_BT=np.zeros(shape, np.int32),
        segment_ids_BT=np.zeros(shape, np.int32),
        action_mask_BT=np.zeros(shape, bool),
        behaviour_logprobs_BT=np.zeros(shape, np.float32),
        advantages_BT=np.zeros(shape, np.float32),
        ages_BT=np.zeros(shape, np.float32),
        values_BT=np.zeros(shape, np.float32),
        returns_BT=np.zeros(shape, np.float32),
    )
    places = []
    for index, row in enumerate(rows):
        start = 0
        for segment, number in enumerate(row, start=1):
            sample = samples[number]
            places.append(Place(number, index, start))
            at = (index, slice(start, start := start + len(sample.token_ids)))
            microbatch.tokens_BT[at] = sample.token_ids
            microbatch.positions_BT[at] = np.arange(len(sample.token_ids))
            microbatch.segment_ids_BT[at] = segment
            microbatch.action_mask_BT[at] = sample.action_mask
            microbatch.behaviour_logprobs_BT[at] = sample.behaviour_logprobs
            for array_BT, values in (
                (microbatch.advantages_BT, sample.advantage),
                (microbatch.ages_BT, sample.ages),
                (microbatch.values_BT, sample.values),
                (microbatch.returns_BT, sample.returns),
            ):
                array_BT[at] = np.where(sample.action_mask, values, 0)
    return microbatch, places
