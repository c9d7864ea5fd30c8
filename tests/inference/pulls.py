"""Engines in this process that pull and install nowhere, and interference between them and who sends."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import grpc
import numpy as np

from headrace import rpc, weights
from headrace.v1 import trainer_service_pb2 as pb
from headrace.v1 import trainer_service_pb2_grpc
from headrace.weight_service import SERVICE
from services.inference import peers
from services.inference.shelf import Shelf
from services.inference.weights import Hold, Puller, Version
from tests.inference import fleet

Tensors = Mapping[str, np.ndarray]


class Engine:
    """A puller in this process, and what it was given."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.versions: dict[int, Version] = {}
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.causes: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    async def install(self, version: Version) -> None:
        async with self._changed:
            self.versions[version.policy_version] = version
            self._changed.notify_all()

    def pulled(self, outcome: str, seconds: float) -> None:
        self.outcomes[outcome] += 1

    def received(self, sender: str, kind: str, size_bytes: int) -> None:
        self.bytes[sender, kind] += size_bytes

    def fell_back(self, cause: str) -> None:
        self.causes.append(cause)

    async def has(self, version: int, tensors: Tensors) -> None:
        """Returns when it holds the version, which must be these tensors to the bit."""
        async with asyncio.timeout(fleet.DEADLINE_S), self._changed:
            await self._changed.wait_for(lambda: version in self.versions)
        got = self.versions[version].tensors
        assert list(got) == list(tensors)
        for name, array in tensors.items():
            assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
            assert weights.tensor_bytes(got[name]) == weights.tensor_bytes(np.asarray(array, order="C")), name


@contextlib.asynccontextmanager
async def pulling(
    trainer: str, *, name: str = "engine-0", bulk: bool = True, serves: bool = False
) -> AsyncIterator[Engine]:
    """An engine that pulls from a trainer."""
    engine = Engine()
    async with contextlib.AsyncExitStack() as stack:
        address = ""
        if serves:
            address = await stack.enter_async_context(
                peers.serving(engine.shelf, "127.0.0.1:0", run_id="run", bulk_listen="127.0.0.1:0" if bulk else "")
            )
        puller = Puller(
            await stack.enter_async_context(rpc.channel(trainer)),
            engine=name,
            run_id="run",
            install=engine.install,
            observer=engine,
            hold=Hold(),
            shelf=engine.shelf,
            trainer_host="127.0.0.1" if bulk else "",
            serving_address=address,
        )
        task = asyncio.ensure_future(puller.run())
        try:
            yield engine
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled(), task.exception()


class Interference:
    """A servicer's context that does something before each message: cuts the call, or damages what is sent."""

    def __init__(self, context: grpc.aio.ServicerContext, before: Callable[[pb.GetWeightsResponse], Awaitable[None]]):
        self._context, self._before = context, before
        self.abort = context.abort

    async def write(self, response: pb.GetWeightsResponse) -> None:
        await self._before(response)
        await self._context.write(response)


class Meddled(trainer_service_pb2_grpc.TrainerServiceServicer):
    """Another servicer's GetWeights, under interference: `meddle(request, response, abort)` comes before a message."""

    def __init__(self, servicer: trainer_service_pb2_grpc.TrainerServiceServicer) -> None:
        self._servicer = servicer
        self.WatchWeights = servicer.WatchWeights
        self.requests: list[pb.GetWeightsRequest] = []
        self.meddle: Callable[..., Awaitable[None]] | None = None

    async def GetWeights(self, request: pb.GetWeightsRequest, context: grpc.aio.ServicerContext) -> None:
        self.requests.append(request)

        async def before(response: pb.GetWeightsResponse) -> None:
            if self.meddle:
                await self.meddle(request, response, context.abort)

        await self._servicer.GetWeights(request, Interference(context, before))


@contextlib.asynccontextmanager
async def meddled(servicer: trainer_service_pb2_grpc.TrainerServiceServicer) -> AsyncIterator[tuple[Meddled, str]]:
    between = Meddled(servicer)
    add = trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server
    server = await rpc.Server.start("127.0.0.1:0", [rpc.Service(SERVICE, add, between)])
    yield between, f"127.0.0.1:{server.port}"
    await server.stop(0)
