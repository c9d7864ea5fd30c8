"""A client of one episode, and in-process servers to talk to, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import grpc.aio

from headrace import rpc
from headrace.v1 import environment_service_pb2 as pb
from headrace.v1 import environment_service_pb2_grpc as pb_grpc
from headrace.v1 import trajectory_pb2
from services.envs.environment import Environment
from services.envs.server import SERVICE, EnvironmentServer

TRAINING, DEMONSTRATION = trajectory_pb2.PURPOSE_TRAINING, trajectory_pb2.PURPOSE_DEMONSTRATION


def task(environment: str, **fields) -> trajectory_pb2.Task:
    """A task of the split train, for training."""
    return trajectory_pb2.Task(
        **{"task_id": "00000001", "environment": environment, "split": "train", "purpose": TRAINING, **fields}
    )


def reset(environment: str, **fields) -> pb.InteractRequest:
    return pb.InteractRequest(reset=task(environment, **fields))


def say(content: str = "", **fields) -> pb.InteractRequest:
    return answer(trajectory_pb2.Message(role="assistant", content=content), **fields)


def answer(message: trajectory_pb2.Message, **fields) -> pb.InteractRequest:
    return pb.InteractRequest(action=pb.Action(message=message, **fields))


class Conversation:
    """One Interact stream."""

    def __init__(self, stub: pb_grpc.EnvironmentServiceStub):
        self.call = stub.Interact(timeout=120)  # worker processes import what they run

    async def send(self, request: pb.InteractRequest) -> pb.InteractResponse:
        """The one response. Raises grpc.aio.AioRpcError."""
        await self.call.write(request)
        received = await self.call.read()
        if received is grpc.aio.EOF:
            raise EOFError(f"the stream ended with {await self.call.code()}")
        return received

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """Half-closes; how the stream ended."""
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF
        return await self.call.code(), await self.call.details()

    async def refusal(self, *requests: pb.InteractRequest) -> tuple[grpc.StatusCode, str]:
        """Sends the requests, the last of which must be refused: with what."""
        for request in requests[:-1]:
            await self.send(request)
        try:
            received = await self.send(requests[-1])
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError(f"answered with {received}")


@contextlib.asynccontextmanager
async def serving(
    environments: dict[str, Callable[[], Environment]], *, capacity: int = 2048, **settings: float
) -> AsyncIterator[tuple[pb_grpc.EnvironmentServiceStub, EnvironmentServer]]:
    """A server in this process and a stub that reaches it over TCP."""
    servicer = EnvironmentServer(environments, capacity=capacity, **settings)
    async with listening(servicer) as address, rpc.channel(address) as channel:
        yield pb_grpc.EnvironmentServiceStub(channel), servicer


@contextlib.asynccontextmanager
async def listening(servicer: EnvironmentServer) -> AsyncIterator[str]:
    """A server in this process: its address."""
    async with servicer:
        add = pb_grpc.add_EnvironmentServiceServicer_to_server
        server = await rpc.Server.start("127.0.0.1:0", [(SERVICE, add, servicer)])
        try:
            yield f"127.0.0.1:{server.port}"
        finally:
            await server.stop(0)


async def play(stub: pb_grpc.EnvironmentServiceStub, request: pb.InteractRequest, policy) -> list[pb.InteractResponse]:
    """A whole episode: `policy` gives a request for each open response."""
    conversation = Conversation(stub)
    responses = [await conversation.send(request)]
    while not (responses[-1].terminated or responses[-1].truncated):
        responses.append(await conversation.send(policy(responses[-1])))
    assert await conversation.end() == (grpc.StatusCode.OK, "")
    return responses
