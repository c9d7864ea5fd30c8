"""Draws docs/scale.png from what benchmarks.scaling simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.pipeline_model.recipe import PUBLICATIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from benchmarks.scaling import Row


def draw(by_engines: Sequence[Row], by_staleness: Sequence[Row], path: Path) -> Path:
    """Four panels: rate and egress over engines, rate and ages over max_staleness. Returns the path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    for publication in PUBLICATIONS:
        rows = [row for row in by_engines if row.label.partition(", ")[2] == publication.name]
        engines = [row.plan.engines for row in rows]
        axes[0, 0].plot(engines, [row.outcome.trajectories_per_s for row in rows], "o-", label=publication.name)
        axes[0, 1].plot(engines, [row.outcome.egress_bytes_per_s / 1e9 for row in rows], "o-", label=publication.name)
    limits = {row.plan.engines: row.limit_per_s for row in by_engines}
    axes[0, 0].plot(list(limits), list(limits.values()), "k:", label="engines and trainer never wait")
    _finish(axes[0, 0], "trajectories/s", "engines", log=True)
    _finish(axes[0, 1], "trainer egress, GB/s", "engines", log=True)
    for name in dict.fromkeys(row.label.split(",")[0] for row in by_staleness):
        rows = [row for row in by_staleness if row.label.startswith(f"{name},")]
        bounds = [row.plan.max_staleness for row in rows]
        axes[1, 0].plot(bounds, [row.outcome.trajectories_per_s for row in rows], "o-", label=name)
    _finish(axes[1, 0], "trajectories/s", "max_staleness")
    axes[1, 0].set_ylim(bottom=0)
    _ages(axes[1, 1], [row for row in by_staleness if row.label.startswith("tools,")])
    _finish(axes[1, 1], "share of trained tokens, by age in versions", "max_staleness (tools)")
    figure.savefig(path, dpi=100)
    return path


def _ages(axes: Axes, rows: Sequence[Row]) -> None:
    oldest = max(row.outcome.max_age for row in rows)
    bottom = [0.0] * len(rows)
    for age in range(oldest + 1):
        shares = []
        for row in rows:
            tokens = row.outcome.tokens_by_age
            shares.append(tokens[age] / sum(tokens) if age < len(tokens) else 0.0)
        axes.bar([row.plan.max_staleness for row in rows], shares, bottom=bottom, label=str(age))
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]


def _finish(axes: Axes, title: str, below: str, *, log: bool = False) -> None:
    axes.set_title(title)
    axes.set_xlabel(below)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
