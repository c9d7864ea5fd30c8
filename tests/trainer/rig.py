"""A real trainer process with a tiny model, and what a test needs to play its gateways."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from headrace import rpc, stream
from headrace.stream import Ticket
from headrace.v1 import trainer_service_pb2 as pb
from headrace.v1 import trainer_service_pb2_grpc
from headrace.v1.trajectory_pb2 import TrajectoryGroup
from services.trainer.insist import insist
from tests import processes
from tests.trainer.gateway import RUN_ID, Gateway, ordinary


def run_file(folder: Path, redis_url: str, **trainer: Any) -> Path:
    """A run file of a tiny model and one environment named `a`; `trainer` replaces keys of its section."""
    tree = {
        "run": {"id": RUN_ID, "directory": str(folder / "runs")},
        "model": {
            "create": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "words": list("abcdefghi"),
            }
        },
        "trainer": {
            "steps": 3,
            "groups_per_step": 2,
            "max_staleness": 1,
            "microbatch_tokens": 64,
            "max_row_tokens": 16,
            "optimizer": {"learning_rate": 1e-2},
            "checkpoint": {"every_steps": 2},
        }
        | trainer,
        "rollout": {"group_size": 2, "max_action_tokens": 2, "max_episode_tokens": 16},
        "environments": {"a": {"class": "guess_number"}},
        "redis": {"url": redis_url, "timeout_s": 5},
        "telemetry": {"tensorboard": False, "log_level": "info"},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


class Trainer:
    """One trainer process and its folder."""

    def __init__(self, config: Path, *options: str):
        self.folder = config.parent
        self.run = self.folder / "runs" / RUN_ID
        port, metrics = processes.free_port(), processes.free_port()
        self.address, self.metrics_address = f"127.0.0.1:{port}", f"127.0.0.1:{metrics}"
        arguments = [
            "--config",
            str(config),
            "--listen",
            self.address,
            "--metrics-listen",
            self.metrics_address,
            *options,
        ]
        # Programs that one test has compiled serve the next.
        environment = {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.process = processes.Process(
            processes.service("trainer", *arguments), self.folder / "trainer.log", environment=environment
        )

    async def status(self) -> pb.GetTrainerStatusResponse | None:
        """What it says of itself; None while it does not answer."""
        async with rpc.channel(self.address) as channel:
            with contextlib.suppress(rpc.grpc.aio.AioRpcError):
                stub = trainer_service_pb2_grpc.TrainerServiceStub(channel)
                return await stub.GetTrainerStatus(pb.GetTrainerStatusRequest(), timeout=2)
        return None

    async def until(self, condition: Callable[[pb.GetTrainerStatusResponse], bool], timeout_s: float = 150) -> None:
        """Returns when its status fulfils the condition."""
        async with asyncio.timeout(timeout_s):
            while (status := await self.status()) is None or not condition(status):
                assert self.process.running, self.process.output[-3000:]
                await asyncio.sleep(0.05)

    async def ended(self, timeout_s: float = 150) -> int:
        """Its exit code."""
        return await asyncio.to_thread(self.process.wait, timeout_s)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A journal of the run."""
        return [json.loads(line) for line in (self.run / name).read_text().splitlines()]

    @property
    def consumed(self) -> list[dict[str, Any]]:
        """Every group that the surviving policy has learned from, in order."""
        return [group for line in self.lines("consumed.jsonl") for group in line["groups"]]

    @property
    def returned(self) -> list[dict[str, Any]]:
        """Every group that ended without entering a gradient."""
        return self.lines("returned.jsonl") if (self.run / "returned.jsonl").exists() else []


@contextlib.contextmanager
def trainer(config: Path, *options: str) -> Iterator[Trainer]:
    """A trainer that is gone when the body ends."""
    subject = Trainer(config, *options)
    try:
        yield subject
    finally:
        subject.process.stop()


async def eventually(read: Callable[[], Awaitable[Any]], value: Any, timeout_s: float = 60) -> None:
    """Returns when `read` gives the value: a trainer counts a step before it issues the step's tickets."""
    async with asyncio.timeout(timeout_s):
        while (seen := await read()) != value:
            assert seen is not None
            await asyncio.sleep(0.02)


Answer = Callable[[Ticket, int], TrajectoryGroup]


def ordinary_answer(ticket: Ticket, version: int) -> TrajectoryGroup:
    """Two episodes, sampled by the newest version that the ticket guarantees."""
    return ordinary(ticket.task, version=version)


async def serve_tickets(streams: stream.Streams, answer: Answer = ordinary_answer) -> None:
    """Ends tickets as they come, until it is cancelled."""
    gateway = Gateway(streams)
    while True:
        for ticket in await insist(lambda: streams.claim("hand", 8, 1.0)):
            gateway.claimed.append(ticket)
            await gateway.publish(ticket, answer(ticket, ticket.task.min_policy_version))


@contextlib.asynccontextmanager
async def serving(streams: stream.Streams, answer: Answer = ordinary_answer) -> AsyncIterator[None]:
    """A gateway in the background."""
    task = asyncio.create_task(serve_tickets(streams, answer))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
