"""Environment servers that break one rule each, written against the bare protocol, as in another language.

`Sound` keeps every rule: count down from a number that the task draws. A subclass breaks what its
name says, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from headrace import rpc
from headrace.v1 import environment_service_pb2 as pb
from headrace.v1 import environment_service_pb2_grpc as pb_grpc
from headrace.v1.trajectory_pb2 import PURPOSE_DEMONSTRATION, Message

NAME = "count_down"
TURNS = 3
CAPACITY = 4

_SERVICE = pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name


def user(content: str) -> Message:
    return Message(role="user", content=content)


class Sound(pb_grpc.EnvironmentServiceServicer):
    """Keeps every rule."""

    def __init__(self) -> None:
        self.taken = 0
        self.opened = itertools.count()

    def info(self) -> pb.EnvironmentInfo:
        splits = [pb.SplitInfo(name="train"), pb.SplitInfo(name="test", task_count=4)]
        return pb.EnvironmentInfo(name=NAME, description="Count down.", splits=splits, metric_names=["turns"])

    async def ListEnvironments(self, request, context) -> pb.ListEnvironmentsResponse:
        return pb.ListEnvironmentsResponse(environments=[self.info()])

    async def Interact(self, requests, context) -> None:
        opening = await anext(requests, None)
        if opening is None:
            return
        if opening.WhichOneof("request") != "reset":
            await self.refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "reset first")
        await self.accept(opening.reset, context)
        self.taken += 1
        try:
            await self.episode(opening.reset, requests, context)
        finally:
            await self.leave()

    async def accept(self, task, context) -> None:
        if task.environment != NAME or task.split not in {split.name for split in self.info().splits}:
            await self.refuse(context, grpc.StatusCode.NOT_FOUND, "no such task")
        if self.taken >= CAPACITY:
            await self.refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    async def leave(self) -> None:
        self.taken -= 1

    async def refuse(self, context, code: grpc.StatusCode, details: str) -> None:
        await context.abort(code, details)

    async def episode(self, task, requests, context) -> None:
        number = random.Random(f"{task.index}/{task.seed}").randint(0, 10**6)
        await context.write(self.first(task, number))
        turn = 0
        async for request in requests:
            if request.WhichOneof("request") != "action" or turn >= TURNS:
                await self.out_of_order(request, turn, context)
                continue
            turn += 1
            await self.answer(task, self.step(task, number, turn, request.action), context)

    async def out_of_order(self, request, turn: int, context) -> None:
        await self.refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "one reset, then actions up to the end")

    async def answer(self, task, response: pb.InteractResponse, context) -> None:
        await context.write(response)

    def first(self, task, number: int) -> pb.InteractResponse:
        return self.shown(task, pb.InteractResponse(messages=[user(str(number))]))

    def step(self, task, number: int, turn: int, action: pb.Action) -> pb.InteractResponse:
        last = turn == TURNS
        response = pb.InteractResponse(messages=[user(str(number - turn))], terminated=last, metrics={"turns": turn})
        if last:
            response.reward = float(number % 2)
        return self.shown(task, response)

    def shown(self, task, response: pb.InteractResponse) -> pb.InteractResponse:
        if task.purpose == PURPOSE_DEMONSTRATION and not response.terminated:
            response.demonstration.CopyFrom(Message(role="assistant", content="next"))
        return response


class WithoutDescription(Sound):
    def info(self) -> pb.EnvironmentInfo:
        info = super().info()
        info.description = ""
        return info


class SilentFirst(Sound):
    """Answers a reset without a prompt."""

    def first(self, task, number: int) -> pb.InteractResponse:
        return self.shown(task, pb.InteractResponse())


class RewardFirst(Sound):
    """Rewards before there was an action."""

    def first(self, task, number: int) -> pb.InteractResponse:
        response = super().first(task, number)
        response.reward = 0
        return response


class SplitWithoutTasks(Sound):
    """Knows no task of a split that it lists."""

    async def accept(self, task, context) -> None:
        await super().accept(task, context)
        if task.split == "test":
            await self.refuse(context, grpc.StatusCode.NOT_FOUND, "not yet")


class AnswersTwice(Sound):
    async def answer(self, task, response: pb.InteractResponse, context) -> None:
        await context.write(response)
        if not response.terminated:
            await context.write(response)


class NeverAnswers(Sound):
    """Leaves actions without an answer."""

    async def answer(self, task, response: pb.InteractResponse, context) -> None:
        pass


class StaysOpen(Sound):
    """Does not end a stream whose client has ended it."""

    async def episode(self, task, requests, context) -> None:
        await super().episode(task, requests, context)
        await asyncio.Event().wait()


class ToolsLate(Sound):
    """Gives tools with the answer to an action."""

    def step(self, task, number: int, turn: int, action: pb.Action) -> pb.InteractResponse:
        response = super().step(task, number, turn, action)
        response.tools.add(name="late", parameters_json='{"type": "object"}')
        return response


class Dice(Sound):
    """Draws from nothing that the task says."""

    def first(self, task, number: int) -> pb.InteractResponse:
        return super().first(task, random.randint(0, 10**9))


class RaisesAtMalformed(Sound):
    def step(self, task, number: int, turn: int, action: pb.Action) -> pb.InteractResponse:
        if action.malformed_tool_calls:
            raise ValueError(action.malformed_tool_calls[0])
        return super().step(task, number, turn, action)


class RaisesAtUnknownTool(Sound):
    def step(self, task, number: int, turn: int, action: pb.Action) -> pb.InteractResponse:
        if action.message.tool_calls:
            raise KeyError(action.message.tool_calls[0].name)
        return super().step(task, number, turn, action)


class ResetsAgain(Sound):
    """Takes a second reset for a new episode."""

    async def out_of_order(self, request, turn: int, context) -> None:
        if request.WhichOneof("request") == "reset":
            await context.write(self.first(request.reset, 1))
        else:
            await super().out_of_order(request, turn, context)


class ResetsAgainRudely(Sound):
    """Refuses a second reset as an internal error."""

    async def out_of_order(self, request, turn: int, context) -> None:
        code = grpc.StatusCode.INTERNAL if request.HasField("reset") else grpc.StatusCode.FAILED_PRECONDITION
        await self.refuse(context, code, "no")


class KnowsEverything(Sound):
    """Resets environments that it does not have."""

    async def accept(self, task, context) -> None:
        if self.taken >= CAPACITY:
            await self.refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


class KnowsEverySplit(Sound):
    async def accept(self, task, context) -> None:
        task.split = "train"
        await super().accept(task, context)


class NaN(Sound):
    """Rewards with what is no number."""

    def step(self, task, number: int, turn: int, action: pb.Action) -> pb.InteractResponse:
        response = super().step(task, number, turn, action)
        if response.HasField("reward"):
            response.reward = math.nan
        return response


class Unrewarded(Sound):
    """Ends without a reward where it means 0."""

    def step(self, task, number: int, turn: int, action: pb.Action) -> pb.InteractResponse:
        response = super().step(task, number, turn, action)
        if response.reward == 0:
            response.ClearField("reward")
        return response


class EndsTwice(Sound):
    """Terminates and truncates."""

    def step(self, task, number: int, turn: int, action: pb.Action) -> pb.InteractResponse:
        response = super().step(task, number, turn, action)
        response.truncated = response.terminated
        return response


class UnnamedMetric(Sound):
    def step(self, task, number: int, turn: int, action: pb.Action) -> pb.InteractResponse:
        response = super().step(task, number, turn, action)
        response.metrics["unheard_of"] = 1
        return response


class InfiniteMetric(Sound):
    def step(self, task, number: int, turn: int, action: pb.Action) -> pb.InteractResponse:
        response = super().step(task, number, turn, action)
        response.metrics["turns"] = math.inf
        return response


class ShowsOnce(Sound):
    """Demonstrates after the reset only."""

    def step(self, task, number: int, turn: int, action: pb.Action) -> pb.InteractResponse:
        response = super().step(task, number, turn, action)
        response.ClearField("demonstration")
        return response


class ShowsAlways(Sound):
    """Demonstrates to a policy under training."""

    def shown(self, task, response: pb.InteractResponse) -> pb.InteractResponse:
        if not response.terminated:
            response.demonstration.CopyFrom(Message(role="assistant", content="next"))
        return response


class GoesOn(Sound):
    """Answers actions after the end."""

    async def out_of_order(self, request, turn: int, context) -> None:
        if request.WhichOneof("request") == "action":
            await context.write(pb.InteractResponse(messages=[user("again")]))
        else:
            await super().out_of_order(request, turn, context)


class Boundless(Sound):
    """Takes more episodes than it says that it can."""

    async def accept(self, task, context) -> None:
        self.taken = 0
        await super().accept(task, context)


class FullRudely(Sound):
    """Refuses for want of room with a code that says nothing of it."""

    async def refuse(self, context, code: grpc.StatusCode, details: str) -> None:
        exhausted = code == grpc.StatusCode.RESOURCE_EXHAUSTED
        await super().refuse(context, grpc.StatusCode.INTERNAL if exhausted else code, details)


class Leaks(Sound):
    """Keeps an environment until its episode ends, whatever its stream does."""

    async def answer(self, task, response: pb.InteractResponse, context) -> None:
        await super().answer(task, response, context)
        self.taken -= response.terminated

    async def leave(self) -> None:
        pass


class Shares(Sound):
    """One state for all episodes."""

    async def episode(self, task, requests, context) -> None:
        self.task = task
        await super().episode(task, requests, context)

    def step(self, task, number: int, turn: int, action: pb.Action) -> pb.InteractResponse:
        shared = random.Random(f"{self.task.index}/{self.task.seed}").randint(0, 10**6)
        return super().step(task, shared, turn, action)


class TiresOfSilence(Sound):
    """Closes a stream on which nothing happens."""

    async def episode(self, task, requests, context) -> None:
        async def patient() -> AsyncIterator[pb.InteractRequest]:
            while True:
                try:
                    async with asyncio.timeout(0.5):
                        request = await anext(requests, None)
                except TimeoutError:
                    await self.refuse(context, grpc.StatusCode.UNAVAILABLE, "idle")
                    return
                if request is None:
                    return
                yield request

        await super().episode(task, patient(), context)


@contextlib.asynccontextmanager
async def serving(servicer: Sound) -> AsyncIterator[str]:
    """Its address while the body runs."""
    add = pb_grpc.add_EnvironmentServiceServicer_to_server
    server = await rpc.Server.start("127.0.0.1:0", [(_SERVICE, add, servicer)])
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)
