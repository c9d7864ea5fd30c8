"""What an episode needs of whoever holds its other end: an environment's server, or an agent outside.

A `Source` gives an episode a `Seat` once there is one, a seat opens one session after another, and a session (`Stage`)
is reset once and then stepped.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

from headrace import config
from headrace.v1 import environment_service_pb2 as environment_pb
from headrace.v1 import trajectory_pb2 as pb


class Stage(Protocol):
    """One session. Raises the errors of environment.py."""

    async def reset(self, task: pb.Task) -> environment_pb.InteractResponse:
        """Starts the task; the response holds the prompt."""

    async def step(self, action: environment_pb.Action) -> environment_pb.InteractResponse:
        """Acts; the response holds what followed."""


class Seat(Protocol):
    """An episode's place."""

    def begin(self, trajectory: pb.Trajectory) -> None:
        """The episode starts; what happens is noted in `trajectory`."""

    def session(self) -> contextlib.AbstractAsyncContextManager[Stage]:
        """A fresh session; it closes with the body."""

    def end(self) -> None:
        """The episode has ended, and the trajectory says how."""


class Source(Protocol):
    """One environment of the run."""

    @property
    def settings(self) -> config.Environment:
        """Its part of the run's config."""

    def place(self, task: pb.Task) -> contextlib.AbstractAsyncContextManager[Seat]:
        """A place for an episode of the task, waited for as long as it takes."""
