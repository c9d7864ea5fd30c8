"""Draws a run's reward over its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.step_log import Step

_WINDOW = 10


def draw(steps: Sequence[Step], path: Path, *, title: str, ceiling: float | None, ceiling_label: str) -> None:
    """Writes a PNG with each step's mean reward, its moving mean, and the ceiling if there is one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    numbers = [step.step for step in steps]
    rewards = [step.reward_mean for step in steps]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes.plot(numbers, rewards, color="tab:blue", alpha=0.3, linewidth=1, label="one step")
    axes.plot(numbers, moving_mean(rewards, _WINDOW), color="tab:blue", linewidth=2, label=f"mean of {_WINDOW} steps")
    if ceiling is not None:
        axes.axhline(ceiling, color="tab:red", linestyle="--", linewidth=1, label=ceiling_label or f"{ceiling:g}")
    axes.set(title=title, xlabel="step", ylabel="mean reward of an episode")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.savefig(path)
    pyplot.close(figure)


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window` - 1 before it."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means
