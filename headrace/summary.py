"""The lines that close a run: what it reached, what it took, where its results are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace import step_log
from headrace.step_log import Step

_WINDOW = 10


def lines(steps: Sequence[Step], *, wall_s: float, restarts: int, results: dict[str, Path]) -> list[str]:
    """Rewards are means of the first and the last steps: 10 of them, or a fifth of the run if that is less. Rates leave
    the first step out.

    Args:
        steps: of the whole run, in order.
        wall_s: seconds from the launcher's start to its end.
        restarts: processes that were started again.
        results: what there is to find where; entries that do not exist are left out.
    """
    if not steps:
        return [f"No step was done in {duration(wall_s)}.", *_found(results)]
    window = max(1, min(_WINDOW, len(steps) // 5))
    first, last = _mean_reward(steps[:window]), _mean_reward(steps[-window:])
    rated = step_log.without_start(steps)
    rated_s = max(sum(step.step_s for step in rated), 1e-9)
    tokens, episodes = sum(step.action_tokens for step in rated), sum(step.trajectories for step in steps)
    over = f" (means of {window} steps)" if window > 1 else ""
    return [
        f"reward      {first:.3f} -> {last:.3f}{over}",
        f"steps       {steps[-1].step} in {duration(wall_s)}, {len(rated) / rated_s:.2f} steps/s",
        f"episodes    {episodes:,} trained on, {tokens / rated_s:,.0f} sampled tokens/s",
        f"trainer     idle {sum(step.idle_fraction * step.step_s for step in rated) / rated_s:.0%} of the time",
        f"staleness   mean {_mean([step.staleness_mean for step in steps]):.2f},"
        f" at most {max(step.staleness_max for step in steps)} versions",
        *([f"restarts    {restarts}"] if restarts else []),
        *_found(results),
    ]


def duration(seconds: float) -> str:
    """Minutes and seconds, or seconds."""
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"


def _found(results: dict[str, Path]) -> list[str]:
    return [f"{name:<11} {path}" for name, path in results.items() if path.exists()]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_reward(steps: Sequence[Step]) -> float:
    return _mean([step.reward_mean for step in steps])
