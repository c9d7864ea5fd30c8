"""Reads runs/<id>/metrics.jsonl: one line for each of the trainer's steps, and now and then one for something else.

A line is a JSON object that the trainer appends when the step is done; a trainer that restarts from a checkpoint takes
back the lines of the steps that it repeats. Should a step appear twice, the later line counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

NAME = "metrics.jsonl"


@dataclass(frozen=True)
class Step:
    """What a line says of its step; a value that the line lacks is 0."""

    step: int
    time_s: float  # when it was done, seconds since the epoch
    step_s: float  # its wall time
    reward_mean: float
    trajectories: int
    action_tokens: int
    idle_fraction: float  # share of the wall time in which the trainer waited for groups
    staleness_mean: float  # age of the trained tokens, in versions
    staleness_max: int


def read(path: Path) -> list[Step]:
    """The run's steps in order; none when the file does not exist yet."""
    steps = {step.step: step for step in _lines(path)}
    return [steps[number] for number in sorted(steps)]


def without_start(steps: Sequence[Step]) -> Sequence[Step]:
    """The steps that rates are taken over: the run's first one waits for engines to start, so it is left out."""
    return steps[1:] if len(steps) > 1 and steps[0].step == 1 else steps


def _lines(path: Path) -> Iterator[Step]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            values = json.loads(line)
        except ValueError:  # the last line, half written
            continue
        if "reward_mean" in values:
            yield _step(values)


def _step(values: dict[str, Any]) -> Step:
    return Step(**{field.name: values.get(field.name) or 0 for field in fields(Step)})
