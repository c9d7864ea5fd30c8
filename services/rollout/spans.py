"""What a gateway adds to traces after the fact."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from headrace import tracing
from headrace.v1 import trajectory_pb2 as pb


@contextlib.contextmanager
def publishing(group: pb.TrajectoryGroup) -> Iterator[None]:
    """The body publishes the group: a span in the trace of each of its trajectories."""
    start_ns = time.time_ns()
    yield
    recorder = tracing.recorder()
    if recorder is None:
        return
    for trajectory in group.trajectories:
        episode = tracing.trajectory_ids(group.run_id, trajectory.trajectory_id, group.gateway)
        if recorder.samples(episode):
            recorder.completed("publish", start_ns, time.time_ns(), parent=episode, ticket_id=group.ticket_id)
