"""What a group costs between gateway and trainer: `python -m benchmarks.bus`.

A real Redis carries tickets and groups as a run does: issue, claim, publish, read, acknowledge. Reported is processor
time, which a busy machine blurs less than wall time, as a constant for an entry and a rate for its bytes: of Redis
(its own count of it), and of the trainer, which reads the group, checks it and makes it learnable.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import results
from benchmarks.results import Figure
from headrace import stream
from headrace import trajectory as records
from headrace.stream import GroupEntry
from headrace.v1 import trajectory_pb2 as pb
from services.trainer.lineage import Lineage
from services.trainer.verdict import Rules, learnable, parse
from tests import processes

RUN_ID, VOCABULARY = "bus", 32_000
GROUP, TURNS, OBSERVED = 8, 4, 128
SHORT, LONG = 16, 1024  # action tokens of a turn


def main() -> None:
    """Measures, prints the table, writes results/bus.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bus", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--groups", type=int, default=1000, help="groups of each size")
    count = parser.parse_args().groups
    short, long = (asyncio.run(measure(tokens, count)) for tokens in (SHORT, LONG))
    size_bytes = long.size_bytes - short.size_bytes
    redis_byte_s = (long.redis_s - short.redis_s) / size_bytes
    trainer_byte_s = (long.trainer_s - short.trainer_s) / size_bytes
    tokens = GROUP * TURNS * (LONG - SHORT)
    figures = [
        Figure("bus_redis_cpu_per_entry", (short.redis_s - redis_byte_s * short.size_bytes) * 1e6, None, None, "us"),
        Figure("bus_redis_cpu_per_mb", redis_byte_s * 1e12, None, None, "us"),
        Figure(
            "bus_trainer_cpu_per_group", (short.trainer_s - trainer_byte_s * short.size_bytes) * 1e6, None, None, "us"
        ),
        Figure("bus_trainer_cpu_per_mb", trainer_byte_s * 1e12, None, None, "us"),
        Figure("bus_bytes_per_action_token", size_bytes / tokens, None, None, "bytes"),
        Figure("bus_group_bytes", short.size_bytes, None, None, "bytes"),
    ]
    print(results.table(["", "ours"], [[figure.metric, f"{figure.ours:.1f} {figure.unit}"] for figure in figures]))
    print(results.write("bus", figures))


@dataclass(frozen=True)
class Cost:
    """Of one ticket and its group."""

    size_bytes: int
    redis_s: float
    trainer_s: float


async def measure(action_tokens: int, count: int) -> Cost:
    """The mean cost over `count` groups, whose turns have so many action tokens."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-bus-") as folder,
        processes.redis_server(Path(folder)) as (url, _),
    ):
        client = stream.connect(url, timeout_s=30)
        await client.config_set("appendfsync", "everysec")
        streams = stream.Streams(client, RUN_ID, claim_timeout_s=60)
        await streams.open()
        lineage = Lineage()
        lineage.publish(1)
        rules = Rules(RUN_ID, VOCABULARY, frozenset({"a"}), 1_000_000, 1, "keep", 0.0)
        redis_s, trainer_s, size_bytes = await _redis_cpu_s(client), 0.0, 0
        for number in range(count):
            task = pb.Task(
                task_id=f"{number:08d}",
                environment="a",
                split="train",
                purpose=pb.PURPOSE_TRAINING,
                min_policy_version=1,
            )
            await streams.issue([task], first_sequence=number)
            (ticket,) = await streams.claim("gateway", 1, 1.0)
            await streams.publish(ticket.ticket_id, _group(ticket, action_tokens))
            start_s = time.process_time()
            (entry,) = await streams.read_groups(1, 1.0)
            _learn(entry, rules, lineage, cursor=number + 1)
            trainer_s += time.process_time() - start_s
            await streams.acknowledge_groups([entry.entry_id])
            size_bytes = len(entry.payload)
        redis_s = await _redis_cpu_s(client) - redis_s
        await client.aclose()  # type: ignore[attr-defined]
    return Cost(size_bytes, redis_s / count, trainer_s / count)


def _learn(entry: GroupEntry, rules: Rules, lineage: Lineage, *, cursor: int) -> None:
    group = learnable(entry, parse(entry, rules, lineage, cursor=cursor), rules, lineage)
    assert len(group.samples) == GROUP


def _group(ticket: stream.Ticket, action_tokens: int) -> pb.TrajectoryGroup:
    draw = np.random.default_rng(0)
    turn = pb.Turn(
        observation_token_ids=records.to_bytes(draw.integers(0, VOCABULARY, OBSERVED), records.INT32),
        action_token_ids=records.to_bytes(draw.integers(0, VOCABULARY, action_tokens), records.INT32),
        action_logprobs=records.to_bytes(-draw.random(action_tokens), records.FLOAT32),
        version_spans=records.version_spans([1] * action_tokens),
        finish_reason=pb.FINISH_REASON_STOP,
        reward=1.0,
    )
    trajectories = [
        pb.Trajectory(
            trajectory_id=f"{ticket.task.task_id}-{number}",
            turns=[turn] * TURNS,
            status=pb.EPISODE_STATUS_COMPLETED,
            terminated=True,
        )
        for number in range(GROUP)
    ]
    return pb.TrajectoryGroup(
        task=ticket.task, trajectories=trajectories, run_id=RUN_ID, ticket_id=ticket.ticket_id, gateway="gateway"
    )


async def _redis_cpu_s(client: object) -> float:
    """Processor time of the server so far, user and system."""
    info = await client.info("cpu")  # type: ignore[attr-defined]
    return float(info["used_cpu_user"] + info["used_cpu_sys"])


if __name__ == "__main__":
    main()
