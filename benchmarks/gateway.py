"""What a step costs a gateway: `python -m benchmarks.gateway`.

One gateway runs 256 episodes of guess_number at once, against an engine that answers at once and a real environment
server, each its own process. Reported is the gateway's processor time by step (one action: a call of the engine, a
step of the environment, and its share of claiming, publishing and recording), which a busy machine blurs less than
wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from pathlib import Path

from benchmarks import results
from benchmarks.results import Figure
from tests.rollout.cluster import Cluster

_WARM_UP_S = 2.0


async def measure(group_count: int) -> list[Figure]:
    """Runs so many groups of 8 episodes."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run = Cluster(
            folder,
            stack,
            script={"tokens": "random"},
            rollout__max_concurrent_episodes=256,
            rollout__group_size=8,
        )
        gateway = run.gateway()
        await asyncio.sleep(_WARM_UP_S)
        start_s, cpu_s = time.perf_counter(), _cpu_s(gateway.pid)
        await run.issue(group_count)
        groups = await run.groups(group_count, timeout_s=600)
        wall_s, cpu_s = time.perf_counter() - start_s, _cpu_s(gateway.pid) - cpu_s
    steps = sum(len(trajectory.turns) for group in groups for trajectory in group.trajectories)
    return [
        Figure("gateway_cpu_per_step", cpu_s / steps * 1e6, None, None, "us"),
        Figure("gateway_steps_per_s", steps / wall_s, None, None, "1/s"),
    ]


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=400, help="groups of 8 episodes of about 4 steps")
    figures = asyncio.run(measure(parser.parse_args().groups))
    print(results.table(["", "ours"], [[figure.metric, f"{figure.ours:.0f} {figure.unit}"] for figure in figures]))
    results.write("gateway", figures)


if __name__ == "__main__":
    main()
