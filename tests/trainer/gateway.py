"""A gateway made by hand: it claims real tickets and publishes groups that the test describes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace import trajectory as records
from headrace.stream import Streams, Ticket
from headrace.v1 import trajectory_pb2 as pb

RUN_ID = "run"
VOCABULARY = 16


def trajectory(
    name: str,
    *,
    reward: float | None,
    versions: Sequence[int] = (1, 1),
    status: int = pb.EPISODE_STATUS_COMPLETED,
    observation: Sequence[int] = (3, 4),
    action: Sequence[int] = (5, 2),
    demonstration: bool = False,
) -> pb.Trajectory:
    """One turn of two observed and two sampled tokens, unless told otherwise; one version for each sampled token."""
    turn = pb.Turn(
        observation_token_ids=records.to_bytes(observation, records.INT32),
        action_token_ids=records.to_bytes(action, records.INT32),
        finish_reason=pb.FINISH_REASON_STOP,
        reward=reward,
    )
    if not demonstration:
        turn.action_logprobs = records.to_bytes([-1.0] * len(action), records.FLOAT32)
        turn.version_spans.extend(records.version_spans(versions))
    ended = status in records.TRAINABLE
    return pb.Trajectory(
        trajectory_id=name,
        turns=[turn],
        status=status,
        terminated=status == pb.EPISODE_STATUS_COMPLETED,
        truncated=ended and status != pb.EPISODE_STATUS_COMPLETED,
    )


def group(task: pb.Task, trajectories: Sequence[pb.Trajectory], *, run_id: str = RUN_ID) -> pb.TrajectoryGroup:
    """A ticket's group."""
    return pb.TrajectoryGroup(task=task, run_id=run_id, gateway="hand", trajectories=trajectories)


def ordinary(task: pb.Task, *, version: int, rewards: Sequence[float] = (0.0, 1.0)) -> pb.TrajectoryGroup:
    """A group of one completed trajectory for each reward, all sampled by one version."""
    return group(
        task,
        [
            trajectory(f"{task.task_id}/{number}", reward=reward, versions=(version, version))
            for number, reward in enumerate(rewards)
        ],
    )


def demonstrated(task: pb.Task) -> pb.TrajectoryGroup:
    """A demonstration."""
    return group(task, [trajectory(f"{task.task_id}/0", reward=1.0, demonstration=True)])


class Gateway:
    """Claims tickets in order and ends them as told."""

    def __init__(self, streams: Streams, name: str = "hand"):
        self._streams, self._name = streams, name
        self.claimed: list[Ticket] = []

    async def claim(self, count: int, timeout_s: float = 60) -> list[Ticket]:
        """Exactly `count` tickets. Raises TimeoutError when fewer come in time."""
        tickets: list[Ticket] = []
        async with asyncio.timeout(timeout_s):
            while len(tickets) < count:
                tickets += await self._streams.claim(self._name, count - len(tickets), 0.5)
        self.claimed += tickets
        return tickets

    async def publish(self, ticket: Ticket, group: pb.TrajectoryGroup) -> None:
        """Ends a ticket."""
        assert await self._streams.publish(ticket.ticket_id, group)
