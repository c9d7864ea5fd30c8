"""A small real EnvironmentService whose episodes follow a play: an async generator of time steps.

A play is called with the task and the number of the session (1, 2, … since start); it yields responses and is sent the
actions. What it raises becomes the stream's end: an `Abort` with its code, anything else INTERNAL.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc

from headrace import rpc
from headrace.v1 import environment_service_pb2 as pb
from headrace.v1 import environment_service_pb2_grpc
from headrace.v1.trajectory_pb2 import Message, Task

Play = Callable[[Task, int], AsyncGenerator[pb.InteractResponse, pb.Action]]


class Abort(Exception):
    """Ends the stream with a status."""

    def __init__(self, code: grpc.StatusCode, message: str = "by the play"):
        self.code, self.message = code, message


class ScriptedEnvironment(environment_service_pb2_grpc.EnvironmentServiceServicer):
    """The server. `actions` holds what each ended or running session received, `open` counts the running ones."""

    def __init__(self, play: Play):
        self.play = play
        self.actions: list[list[pb.Action]] = []
        self.tasks: list[Task] = []
        self.open = 0
        self._server: rpc.Server

    @classmethod
    async def start(cls, play: Play, *, listen: str = "127.0.0.1:0") -> ScriptedEnvironment:
        environment = cls(play)
        name = pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name
        add = environment_service_pb2_grpc.add_EnvironmentServiceServicer_to_server
        environment._server = await rpc.Server.start(listen, [rpc.Service(name, add, environment)])
        await environment._server.set_serving(True)
        return environment

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.port}"

    async def stop(self) -> None:
        await self._server.stop(0)

    async def Interact(self, requests: Any, context: Any) -> None:
        actions: list[pb.Action] = []
        self.actions.append(actions)
        self.open += 1
        try:
            first = await anext(requests)
            self.tasks.append(first.reset)
            play = self.play(first.reset, len(self.actions))
            await context.write(await anext(play))
            async for request in requests:
                actions.append(request.action)
                await context.write(await play.asend(request.action))
        except StopAsyncIteration:
            pass
        except Abort as abort:
            await context.abort(abort.code, abort.message)
        finally:
            self.open -= 1


def says(
    text: str, reward: float | None = None, *, terminated: bool = False, truncated: bool = False, **changes: Any
) -> pb.InteractResponse:
    """A time step with one user message."""
    return pb.InteractResponse(
        messages=[Message(role="user", content=text)],
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        **changes,
    )


def turns(count: int, *, reward: float = 1.0) -> Play:
    """A play whose task ends with a reward after `count` actions."""

    async def play(task: Task, session: int) -> AsyncGenerator[pb.InteractResponse, pb.Action]:
        yield says("guess a number")
        for _ in range(count - 1):
            yield says("higher")
        yield says("found", reward, terminated=True)

    return play
