"""Which task a ticket asks for: a pure function of the run's seed and the ticket's sequence number.

The sequence number decides everything, so a trainer that resumes at number n goes on exactly as one that never stopped.
An environment of known size is walked epoch by epoch, each in its own shuffled order; the tasks of any other are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.v1.trajectory_pb2 import Task

_BLOCK = 4096
_DRAWN_INDICES = 2**31


@dataclass(frozen=True)
class TaskSource:
    """One environment as the order sees it."""

    split: str
    # Share of the tickets, relative to the other environments'.
    weight: float
    # Tasks of the split; None: drawn without end.
    task_count: int | None


class TaskOrder:
    """The order of a run's training tasks. `task` costs O(1) when sequence numbers grow, O(n) after a jump to n."""

    def __init__(self, sources: Mapping[str, TaskSource], *, seed: int):
        self._names = sorted(sources)
        self._sources = [sources[name] for name in self._names]
        weights = np.array([source.weight for source in self._sources])
        self._bounds = np.cumsum(weights / weights.sum())[:-1]
        self._seed = seed
        self._passed = np.zeros(len(self._names), np.int64)
        self._position = 0
        self._block: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self._epochs: dict[int, tuple[int, np.ndarray]] = {}

    def task(self, sequence: int) -> Task:
        """The task of ticket number `sequence`, without the fields that say why and when it is issued."""
        if sequence < self._position:
            self._passed[:], self._position = 0, 0
        while self._position < sequence:
            number, offset = divmod(self._position, _BLOCK)
            length = min(_BLOCK - offset, sequence - self._position)
            choices = self._choices(number)[offset : offset + length]
            self._passed += np.bincount(choices, minlength=len(self._names))
            self._position += length
        choice = int(self._choices(sequence // _BLOCK)[sequence % _BLOCK])
        source = self._sources[choice]
        seed, drawn = self._random(1, sequence).integers(0, 2**63, 2)
        index = int(drawn) % _DRAWN_INDICES
        if source.task_count is not None:
            epoch, place = divmod(int(self._passed[choice]), source.task_count)
            index = int(self._shuffled(choice, epoch, source.task_count)[place])
        return Task(
            task_id=task_id(sequence),
            environment=self._names[choice],
            split=source.split,
            index=index,
            seed=int(seed),
        )

    def _choices(self, block: int) -> np.ndarray:
        """int64[_BLOCK]: which environment each ticket of the block asks."""
        if self._block[0] != block:
            self._block = block, np.searchsorted(self._bounds, self._random(0, block).random(_BLOCK), side="right")
        return self._block[1]

    def _shuffled(self, choice: int, epoch: int, task_count: int) -> np.ndarray:
        if self._epochs.get(choice, (-1,))[0] != epoch:
            self._epochs[choice] = epoch, self._random(2, choice, epoch).permutation(task_count)
        return self._epochs[choice][1]

    def _random(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self._seed, *key))))


def task_id(sequence: int) -> str:
    """The task id of ticket number `sequence`."""
    return f"{sequence:08d}"


def sequence_number(task: Task) -> int:
    """The ticket's number. Raises ValueError when its task id is none of ours."""
    sequence = int(task.task_id)
    if sequence < 0 or task_id(sequence) != task.task_id:
        raise ValueError(f"task_id {task.task_id!r} is no ticket number")
    return sequence
