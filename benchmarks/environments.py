"""What the episode loop adds to its environments: `python -m benchmarks.environments`.

Episodes of four steps against an environment that waits, with an engine that answers at once, at several concurrencies
and latencies: our gateway (a process of its own, its engine over HTTP, its environment over gRPC, its groups through
Redis) and Tunix's RolloutOrchestrator with its TrajectoryCollectEngine (one process, everything within it), on the same
machine in one run. The ideal rate is concurrency / latency steps/s, which no loop can pass. Processor time is the
gateway's, and Tunix's process's; the engine and the environment server are not part of ours, and cost Tunix a call.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import results, tunix_venv
from benchmarks.results import Figure
from tests.processes import ROOT
from tests.rollout.cluster import Cluster

TURNS, GROUP, ACTION_TOKENS = 4, 8, 16
CONCURRENCIES = (16, 256, 2000)
LATENCIES_S = (0.0, 0.05, 0.5)
_MOST_EPISODES = 4000
_IDEAL_S = 3.0  # about what a case takes in an ideal loop


@dataclass(frozen=True)
class Case:
    """What both loops run."""

    concurrency: int
    latency_s: float
    episodes: int
    turns: int = TURNS
    group: int = GROUP
    action_tokens: int = ACTION_TOKENS

    @property
    def steps(self) -> int:
        return self.episodes * self.turns

    @property
    def ideal_steps_per_s(self) -> float | None:
        return self.concurrency / self.latency_s if self.latency_s else None

    @property
    def name(self) -> str:
        return f"{self.concurrency}_episodes_{self.latency_s * 1000:.0f}_ms"


@dataclass(frozen=True)
class Cost:
    """What a loop took for a case."""

    wall_s: float
    cpu_s: float


def case(concurrency: int, latency_s: float) -> Case:
    """A case that takes a few seconds; at least two waves, so that episodes follow one another."""
    waves = max(2, round(_IDEAL_S / (TURNS * latency_s))) if latency_s else max(2, 1000 // concurrency)
    return Case(concurrency, latency_s, min(waves * concurrency, max(_MOST_EPISODES, 2 * concurrency)) // GROUP * GROUP)


async def ours(measured: Case) -> Cost:
    """Runs a case on one gateway."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = {
            "class": "benchmarks.latency_environment:Latency",
            "options": {"mean_s": measured.latency_s, "sigma": 0.0, "turns": measured.turns},
            "max_turns": measured.turns,
            "max_concurrent_episodes": 2 * measured.concurrency,
        }
        overrides: dict[str, Any] = {f"environments__guess_number__{key}": value for key, value in environment.items()}
        run = Cluster(
            folder,
            stack,
            script={"tokens": "random", "length": measured.action_tokens},
            rollout__max_concurrent_episodes=measured.concurrency,
            rollout__group_size=measured.group,
            rollout__max_action_tokens=measured.action_tokens,
            rollout__max_episode_tokens=121,
            trainer__max_row_tokens=121,
            **overrides,
        )
        gateway = run.gateway()
        await _play(run, range(2))  # connects, and warms up
        wall_s, cpu_s = time.perf_counter(), _cpu_s(gateway.pid)
        await _play(run, range(2, 2 + measured.episodes // measured.group))
        cost = Cost(time.perf_counter() - wall_s, _cpu_s(gateway.pid) - cpu_s)
        return cost


async def _play(run: Cluster, numbers: range) -> None:
    await run.issue(len(numbers), first=numbers[0])
    groups = await run.groups(len(numbers), timeout_s=120)
    ended = sum(trajectory.terminated for group in groups for trajectory in group.trajectories)
    if ended != len(numbers) * GROUP:
        raise SystemExit(f"{ended} of {len(numbers) * GROUP} episodes ended well")


def tunix(cases: list[Case]) -> list[Cost]:
    """Runs the cases in Tunix."""
    python = tunix_venv.ensure(ROOT / ".cache" / "tunix")
    command = [str(python), "-m", "benchmarks.tunix_episodes", "--cases", json.dumps([asdict(each) for each in cases])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    costs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(costs) != len(cases):
        raise SystemExit(f"Tunix failed: {done.stderr[-2000:]}")
    return [Cost(cost["wall_s"], cost["cpu_s"]) for cost in costs]


def figures(measured: Case, own: Cost, rival: Cost | None) -> list[Figure]:
    """The figures of a case."""
    ideal = measured.ideal_steps_per_s
    rate = Figure(
        f"{measured.name}.steps_per_s",
        measured.steps / own.wall_s,
        measured.steps / rival.wall_s if rival else None,
        ideal,
        "1/s",
    )
    cpu = Figure(
        f"{measured.name}.cpu_per_step",
        own.cpu_s / measured.steps * 1e6,
        rival.cpu_s / measured.steps * 1e6 if rival else None,
        None,
        "us",
    )
    if not ideal:
        return [rate, cpu]
    share = Figure(
        f"{measured.name}.share_of_ideal", rate.ours / ideal, rate.rival / ideal if rate.rival else None, 1.0, ""
    )
    return [rate, share, cpu]


def _row(measured: Case, found: list[Figure]) -> list[str]:
    by_name = {figure.metric.rpartition(".")[2]: figure for figure in found}
    rate, cpu = by_name["steps_per_s"], by_name["cpu_per_step"]
    share = by_name.get("share_of_ideal")

    def number(value: float | None, form: str = ",.0f") -> str:
        return "" if value is None else format(value, form)

    return [
        f"{measured.concurrency} at {measured.latency_s * 1000:.0f} ms",
        *(number(rate.ours), number(rate.rival), number(rate.ours / rate.rival if rate.rival else None, ".2f")),
        *(number(share.ours if share else None, ".2f"), number(share.rival if share else None, ".2f")),
        *(number(cpu.ours), number(cpu.rival)),
    ]


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measures, prints a table and writes results/environments.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.environments", description=__doc__.split("\n")[0])
    parser.add_argument("--concurrencies", type=int, nargs="+", default=CONCURRENCIES)
    parser.add_argument("--latencies-s", type=float, nargs="+", default=LATENCIES_S)
    parser.add_argument("--no-tunix", action="store_true", help="leave Tunix out")
    options = parser.parse_args()
    cases = [case(concurrency, latency) for latency in options.latencies_s for concurrency in options.concurrencies]
    own = []
    for each in cases:
        own.append(asyncio.run(ours(each)))
        print(f"ours, {each.name}: {each.steps / own[-1].wall_s:,.0f} steps/s", file=sys.stderr)
    rivals: list[Cost | None] = [None] * len(cases) if options.no_tunix else [*tunix(cases)]
    found = [figures(*each) for each in zip(cases, own, rivals, strict=True)]
    header = ["episodes at latency", "steps/s", "Tunix", "ratio", "of ideal", "Tunix", "us CPU/step", "Tunix"]
    print(results.table(header, [_row(each, figures_) for each, figures_ in zip(cases, found, strict=True)]))
    results.write("environments", [figure for each in found for figure in each])


if __name__ == "__main__":
    main()
