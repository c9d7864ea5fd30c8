"""The weight puller: keeps the engine on the trainer's newest version.

One loop, for ever: watch until the trainer announces a version newer than the one held; get it; check every tensor and
the whole against the announced hashes; hand it to `install`, which stages it and returns once it is swapped in. Then
watch again, so that the trainer hears which version this engine holds.

Blocks on the trainer. The trainer may be absent, start later, restart or vanish in the middle: the puller tries again
with growing pauses, and the engine serves what it holds meanwhile. A damaged transfer is pulled again as a whole; a
version that the trainer no longer keeps is passed over for the next; a version that is not newer, or another run's, is
refused.

A Hold keeps the engine on its version for a while, for evaluation or a look at one policy. It ends by itself, so that
no engine stays behind because whoever held it has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import grpc
import grpc.aio
import numpy as np

from headrace import weights
from headrace.v1 import trainer_service_pb2 as pb
from headrace.v1 import trainer_service_pb2_grpc

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_SILENCE_S = 60.0  # a transfer that brings nothing for so long has failed


class CorruptWeights(Exception):
    """What came is not what the manifest or the announcement says; the message names the tensor."""


@dataclasses.dataclass(frozen=True)
class Version:
    """One version, checked. The arrays have Hugging Face names and layout, and are never written to again."""

    run_id: str
    policy_version: int
    root_hash: str
    tensors: Mapping[str, np.ndarray]


class Hold:
    """While it lasts, the puller replaces nothing."""

    def __init__(self) -> None:
        self._until_s = 0.0
        self._changed = asyncio.Event()

    @property
    def remaining_s(self) -> float:
        """Seconds that it lasts yet."""
        return max(0.0, self._until_s - time.monotonic())

    def set(self, seconds: float) -> None:
        """Lasts so many seconds from now, whatever was set before; 0 ends it."""
        self._until_s = time.monotonic() + seconds
        self._changed.set()

    async def ended(self) -> None:
        """Returns once it does not last."""
        while left_s := self.remaining_s:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()


class PullObserver(Protocol):
    """What wants to know how pulls end."""

    def pulled(self, outcome: str, seconds: float) -> None:
        """A pull ended after so many seconds: "ok", "corrupt", "gone", "unavailable" or "wrong_run"."""


class Puller:
    """Pulls versions of one run from one trainer."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        engine: str,
        run_id: str,
        install: Callable[[Version], Awaitable[None]],
        observer: PullObserver,
        hold: Hold,
    ):
        self._trainer = trainer_service_pb2_grpc.TrainerServiceStub(channel)
        self._engine = engine
        self._run_id = run_id
        self._install = install
        self._observer = observer
        self._hold = hold
        self._held: int | None = None

    async def run(self) -> None:
        """Pulls for ever. Raises what `install` raises: weights that do not fit the model will not fit later either."""
        pause_s = _FIRST_PAUSE_S
        while True:
            start_s = time.monotonic()
            try:
                version = await self._next_version()
            except CorruptWeights as error:
                outcome = "corrupt"
                log.error("weights are damaged, pulling them again: %s", error)
            except grpc.aio.AioRpcError as error:
                outcome = "gone" if error.code() == grpc.StatusCode.NOT_FOUND else "unavailable"
                refused = error.code() == grpc.StatusCode.UNAUTHENTICATED
                level = logging.ERROR if refused else logging.INFO
                log.log(
                    level if pause_s == _FIRST_PAUSE_S else logging.DEBUG,
                    "no weights from the trainer for now: %s %s",
                    error.code().name,
                    error.details(),
                )
            except (TimeoutError, ConnectionError) as error:
                outcome = "unavailable"
                log.warning("watching the trainer again: %s", error or f"it sent nothing for {_SILENCE_S:.0f} s")
            else:
                if version is None:
                    outcome = "wrong_run"
                else:
                    if self._held is not None:
                        await self._hold.ended()  # it may have begun during the pull
                    await self._install(version)
                    self._held = version.policy_version
                    pause_s = _FIRST_PAUSE_S
                    continue
            self._observer.pulled(outcome, time.monotonic() - start_s)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _next_version(self) -> Version | None:
        """The next version that is newer than the one held; None when the trainer runs another run."""
        request = pb.WatchWeightsRequest(engine=self._engine)
        if self._held is not None:
            request.held_policy_version = self._held
        watch = self._trainer.WatchWeights(request, wait_for_ready=True)
        try:
            async for news in watch:
                if news.run_id != self._run_id:
                    log.error(
                        "refusing weights: the trainer at this address works on run %r, but this engine belongs to"
                        " run %r; give both the same run file, or correct trainer.address",
                        news.run_id,
                        self._run_id,
                    )
                    return None
                if self._held is not None and news.policy_version <= self._held:
                    if news.policy_version < self._held:
                        log.warning("keeping version %d: %d is older", self._held, news.policy_version)
                    continue
                if self._held is not None:
                    await self._hold.ended()
                start_s = time.monotonic()
                version = await self._get(news)
                self._observer.pulled("ok", time.monotonic() - start_s)
                return version
        finally:
            watch.cancel()
        raise ConnectionError("it ended the watch")

    async def _get(self, news: pb.WatchWeightsResponse) -> Version:
        call = self._trainer.GetWeights(pb.GetWeightsRequest(run_id=news.run_id, policy_version=news.policy_version))
        try:
            first = await _read(call)
            if first is None or first.WhichOneof("part") != "manifest":
                raise CorruptWeights("the first message is no manifest")
            manifest = first.manifest
            _check_manifest(manifest, news)
            tensors = {}
            for index, info in enumerate(manifest.tensors):
                tensors[info.name] = await _receive(call, index, info)
            if await _read(call) is not None:
                raise CorruptWeights("more data came than the manifest lists")
        finally:
            call.cancel()
        return Version(news.run_id, news.policy_version, manifest.root_hash, tensors)


def _check_manifest(manifest: pb.WeightManifest, news: pb.WatchWeightsResponse) -> None:
    if manifest.policy_version != news.policy_version:
        raise CorruptWeights(f"version {news.policy_version} was asked for, {manifest.policy_version} came")
    if manifest.HasField("base_policy_version"):
        raise CorruptWeights("a difference came, but a full snapshot was asked for")
    if len({tensor.name for tensor in manifest.tensors}) != len(manifest.tensors):
        raise CorruptWeights("the manifest names a tensor twice")
    if weights.root_hash(manifest.tensors) != manifest.root_hash or manifest.root_hash != news.root_hash:
        raise CorruptWeights("the manifest's root hash is not that of its tensors, or not the announced one")


async def _receive(call: grpc.aio.UnaryStreamCall, index: int, info: pb.TensorInfo) -> np.ndarray:
    """One tensor, put together from its chunks and checked."""
    try:
        data = np.empty(weights.size_bytes(info), np.uint8)
        dtype = weights.tensor_dtype(info.type)
    except ValueError as error:
        raise CorruptWeights(str(error)) from error
    filled = 0
    while filled < data.size:
        response = await _read(call)
        if response is None:
            raise CorruptWeights(f"{info.name}: the transfer ended after {filled} of {data.size} bytes")
        chunk = response.chunk
        end = filled + len(chunk.data)
        if response.WhichOneof("part") != "chunk" or chunk.tensor_index != index or chunk.offset != filled:
            raise CorruptWeights(f"{info.name}: expected its byte {filled}, something else came")
        if not chunk.data or end > data.size:
            raise CorruptWeights(f"{info.name}: a chunk is empty or passes its end")
        data[filled:end] = np.frombuffer(chunk.data, np.uint8)
        filled = end
    # Hashing releases the interpreter, so that serving goes on meanwhile.
    if await asyncio.to_thread(weights.tensor_hash, data.data) != info.hash:
        raise CorruptWeights(f"{info.name}: its bytes do not have the hash that the manifest gives")
    return data.view(dtype).reshape(tuple(info.shape))


async def _read(call: grpc.aio.UnaryStreamCall) -> pb.GetWeightsResponse | None:
    """The next message, None at the end."""
    async with asyncio.timeout(_SILENCE_S):
        response = await call.read()
    return None if response is grpc.aio.EOF else response
