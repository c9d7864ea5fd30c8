"""Shows a run while it goes: on a terminal one line that is written over, elsewhere a line every few seconds.

`follow` asks the trainer what it does and reads the steps that it has logged; it blocks on neither.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import grpc

from headrace import rpc, step_log
from headrace.security import PLAIN, Security
from headrace.step_log import Step
from headrace.v1 import trainer_service_pb2 as pb
from headrace.v1 import trainer_service_pb2_grpc

_RECENT = 10  # steps that rates are taken over
_CLEAR_LINE = "\r\033[K"


class Display:
    """Lines for people. A status replaces the one before it on a terminal; elsewhere it is a line like any other."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._width = shutil.get_terminal_size().columns
        self._status = ""
        self.live = stream.isatty()

    def say(self, line: str) -> None:
        """A line that stays."""
        if self.live:
            self._write(f"{_CLEAR_LINE}{line}\n{self._status}")
        else:
            self._write(f"{line}\n")

    def show(self, status: str) -> None:
        """The line that says how things stand; the same one again is not repeated."""
        if self.live:
            status = status[: self._width - 1]
        if status == self._status:
            return
        self._status = status
        self._write(f"{_CLEAR_LINE}{status}" if self.live else f"{status}\n")

    def end_status(self) -> None:
        """Leaves the last status standing."""
        if self.live and self._status:
            self._write("\n")
        self._status = ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


async def follow(
    display: Display, *, trainer_address: str, metrics: Path, total_steps: int, security: Security = PLAIN
) -> None:
    """Shows the run's progress until it is cancelled: twice a second on a terminal, else every five seconds."""
    interval_s = 0.5 if display.live else 5.0
    async with rpc.channel(trainer_address, security=security) as channel:
        trainer = trainer_service_pb2_grpc.TrainerServiceStub(channel)
        while True:
            status = await _ask(trainer)
            steps = await asyncio.to_thread(step_log.read, metrics)
            display.show(describe(steps, status, total_steps=total_steps))
            await asyncio.sleep(interval_s)


def describe(steps: Sequence[Step], status: pb.GetTrainerStatusResponse | None, *, total_steps: int) -> str:
    """One line: how far the run is and how it goes."""
    if not steps:
        if status is None:
            return "waiting for the trainer to answer"
        if status.phase == pb.TRAINER_PHASE_STARTING:
            return "the trainer is starting"
        engines = sum(version > 0 for version in status.engine_versions.values())
        return f"waiting for groups (tickets out: {status.outstanding_tickets}, engines that hold weights: {engines})"
    last, recent = steps[-1], step_log.without_start(steps)[-_RECENT:]
    wall_s = sum(step.step_s for step in recent) or 1e-9
    return (
        f"step {last.step}/{total_steps}  reward {last.reward_mean:.3f}"
        f"  staleness {last.staleness_mean:.2f} (max {last.staleness_max})"
        f"  idle {sum(step.idle_fraction * step.step_s for step in recent) / wall_s:.0%}"
        f"  {sum(step.action_tokens for step in recent) / wall_s:,.0f} tokens/s  {len(recent) / wall_s:.2f} steps/s"
    )


async def _ask(trainer: trainer_service_pb2_grpc.TrainerServiceStub) -> pb.GetTrainerStatusResponse | None:
    try:
        return await trainer.GetTrainerStatus(pb.GetTrainerStatusRequest(), timeout=2)
    except grpc.aio.AioRpcError:
        return None
