"""Figures of a benchmark: a table for people, a JSON file for everything else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Figure:
    """One measured number beside a rival's and the limit that nobody can pass; None where there is none."""

    metric: str
    ours: float
    rival: float | None
    limit: float | None
    unit: str


def write(name: str, figures: Sequence[Figure], *, folder: Path = FOLDER) -> Path:
    """Writes <name>.json, {metric: {"ours", "rival", "limit", "unit"}}, and returns its path.

    Metrics that an earlier run wrote and this one did not measure stay.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= {
        figure.metric: {"ours": figure.ours, "rival": figure.rival, "limit": figure.limit, "unit": figure.unit}
        for figure in figures
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, the first to the left and the others to the right."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
