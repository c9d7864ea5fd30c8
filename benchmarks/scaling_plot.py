"""Draws docs/scale.png from benchmarks/results/scaling.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import results
from benchmarks.pipeline_model.recipe import PUBLICATIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(engines: Sequence[int], staleness: Sequence[int], path: Path, *, folder: Path = results.FOLDER) -> Path:
    """Four panels: rate and egress over engines, rate and ages over max_staleness. Returns the path."""
    from matplotlib.figure import Figure

    figures = json.loads((folder / "scaling.json").read_text())

    def value(metric: str, row: str, column: str = "ours") -> float:
        return float(figures.get(f"scaling_{metric}_{row}", {}).get(column, 0.0))

    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    for publication in PUBLICATIONS:
        rows = [f"engines_{count}_{publication.slug}" for count in engines]
        rates = [value("trajectories_per_s", row) for row in rows]
        axes[0, 0].plot(engines, rates, "o-", label=publication.name)
        egress = [value("egress_bytes_per_s", row) / 1e9 for row in rows]
        axes[0, 1].plot(engines, egress, "o-", label=publication.name)
    limits = [value("trajectories_per_s", f"engines_{count}_{PUBLICATIONS[0].slug}", "limit") for count in engines]
    axes[0, 0].plot(engines, limits, "k:", label="engines and trainer never wait")
    _finish(axes[0, 0], "trajectories/s", "engines", log=True)
    _finish(axes[0, 1], "trainer egress, GB/s", "engines", log=True)
    for workload in ("tools", "stragglers"):
        rates = [value("trajectories_per_s", f"staleness_{bound}_{workload}") for bound in staleness]
        axes[1, 0].plot(staleness, rates, "o-", label=workload)
    _finish(axes[1, 0], "trajectories/s", "max_staleness")
    axes[1, 0].set_ylim(bottom=0)
    bottom = [0.0] * len(staleness)
    for age in range(max(staleness) + 1):
        shares = [value(f"tokens_of_age_{age}", f"staleness_{bound}_tools") for bound in staleness]
        axes[1, 1].bar(staleness, shares, bottom=bottom, label=str(age))
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    _finish(axes[1, 1], "share of trained tokens, by age in versions", "max_staleness (tools)")
    axes[1, 1].legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    for panel in axes[1]:
        panel.set_xticks(list(staleness))
    figure.savefig(path, dpi=100)
    return path


def _finish(axes: Axes, title: str, below: str, *, log: bool = False) -> None:
    axes.set_title(title)
    axes.set_xlabel(below)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
