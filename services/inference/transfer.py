"""One version on its way to this engine, from one sender or from several, one after the other.

What has arrived and been checked stays when a sender fails; the next is asked for the tensors that are missing. Every
tensor is checked as itself, whether its bytes came, a difference to those held, or nothing since it is the same, and
only then passed on to peers. Checking runs in a thread while more is received.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

import grpc
import grpc.aio
import numpy as np

from headrace import delta, weights
from headrace.bulk import BATCH_BYTES, BulkConnection
from headrace.shipment import Shipment, parcel_sizes
from headrace.v1 import trainer_service_pb2 as pb
from headrace.v1 import trainer_service_pb2_grpc
from services.inference.shelf import HeldWeights, Shelf, without_base

_WITHOUT_BULK_S = 60.0
_SLOWEST_BYTES_PER_S = 1024 * 1024


class CorruptWeights(Exception):
    """What came is not what the manifest or the announcement says; the message names the tensor."""


class Sender:
    """The trainer, or a peer."""

    def __init__(self, channel: grpc.aio.Channel, *, kind: str, host: str, silence_s: float):
        """
        Args:
            kind: "trainer" or "peer".
            host: where its bulk port is; "" for bytes over gRPC alone.
            silence_s: a sender from which nothing comes for so long has failed.
        """
        self.kind, self.host, self.silence_s = kind, host, silence_s
        self.stub = trainer_service_pb2_grpc.TrainerServiceStub(channel)
        self._bulk_from_s = 0.0

    @property
    def accepts_ticket(self) -> bool:
        """Whether bytes may come beside gRPC."""
        return bool(self.host) and time.monotonic() >= self._bulk_from_s

    def bulk_failed(self) -> None:
        """Its bulk port could not be reached; it is left alone for a minute."""
        self._bulk_from_s = time.monotonic() + _WITHOUT_BULK_S


class BulkUnreachable(Exception):
    """The sender's bulk port cannot be reached."""


class Transfer:
    """What has come of a version."""

    def __init__(
        self,
        news: pb.WatchWeightsResponse,
        shelf: Shelf,
        base: HeldWeights | None,
        count: Callable[[str, str, int], None],
    ):
        """
        Args:
            base: what is held, if a difference to it is welcome.
            count: told who sent ("trainer" or "peer"), what ("full" or "delta"), and how many bytes.
        """
        self.base = base
        self.failed_peers: list[str] = []  # addresses; none is asked twice
        self.questions = 0  # times that the trainer has been asked for other peers
        self._news, self._shelf, self._count = news, shelf, count
        self._arrays: list[np.ndarray] = []

    def is_of(self, news: pb.WatchWeightsResponse) -> bool:
        """Whether it is of the announced version."""
        return (self._news.policy_version, self._news.root_hash) == (news.policy_version, news.root_hash)

    async def receive(self, sender: Sender) -> HeldWeights:
        """Fetches what is missing.

        Raises:
            CorruptWeights: something wrong came.
            BulkUnreachable: ask again; the bytes will come over gRPC.
            grpc.aio.AioRpcError, OSError: the sender failed, or (TimeoutError) sent nothing for too long.
        """
        request = pb.GetWeightsRequest(
            run_id=self._news.run_id,
            policy_version=self._news.policy_version,
            first_tensor=len(self._arrays),
            accepts_ticket=sender.accepts_ticket,
        )
        if self.base:
            request.base_policy_version = self.base.policy_version
        call = sender.stub.GetWeights(request)
        try:
            first = await read(call, sender.silence_s)
            if first is None or first.WhichOneof("part") != "manifest":
                raise CorruptWeights("the first message is no manifest")
            await self._receive(first.manifest, call, sender)
        finally:
            call.cancel()
        full = without_base(first.manifest)
        return HeldWeights(full, {info.name: array for info, array in zip(full.tensors, self._arrays, strict=True)})

    async def _receive(self, manifest: pb.WeightManifest, call: grpc.aio.UnaryStreamCall, sender: Sender) -> None:
        sizes = self._checked(manifest)
        full, relayed = self._shelf.receive(manifest)
        kind = "delta" if manifest.parcels else "full"
        missing = sizes[len(self._arrays) :]
        second = await read(call, sender.silence_s + max(missing) / _SLOWEST_BYTES_PER_S) if any(missing) else None
        bulk = None
        if second is not None and second.WhichOneof("part") == "ticket":
            try:
                bulk = await BulkConnection.open(sender.host, second.ticket)
            except OSError as error:
                sender.bulk_failed()
                raise BulkUnreachable(str(error)) from error
        chunks = _Chunks(manifest, call, second, sender.silence_s)
        checking: asyncio.Future[None] | None = None
        try:
            for batch in _batches(sizes, len(self._arrays)):
                parcels = [np.empty(sizes[index], np.uint8) for index in batch]
                size = sum(map(len, parcels))
                async with asyncio.timeout(sender.silence_s + size / _SLOWEST_BYTES_PER_S):
                    if bulk:
                        await bulk.read_into([parcel.data for parcel in parcels])
                    else:
                        for index, parcel in zip(batch, parcels, strict=True):
                            await chunks.read_into(index, parcel)
                self._count(sender.kind, kind, size)
                if checking:
                    await checking
                checking = asyncio.ensure_future(self._check(manifest, batch, parcels, full, relayed))
            if checking:
                await checking
            if await chunks.read_end() is not None:
                raise CorruptWeights("more data came than the manifest lists")
        except OSError as error:
            if bulk is None or checking or isinstance(error, TimeoutError):
                raise
            # What is between may let connections come about and nothing through; gRPC tells whether the sender lives.
            sender.bulk_failed()
            raise BulkUnreachable(f"nothing comes from it: {error}") from error
        finally:
            if checking:
                await asyncio.gather(checking, return_exceptions=True)  # what has come whole counts
            if bulk:
                bulk.close()

    def _checked(self, manifest: pb.WeightManifest) -> list[int]:
        """Bytes that travel for each tensor. Raises CorruptWeights for a manifest that is not of this version."""
        news = self._news
        if manifest.policy_version != news.policy_version:
            raise CorruptWeights(f"version {news.policy_version} was asked for, {manifest.policy_version} came")
        if manifest.HasField("base_policy_version") != bool(manifest.parcels):
            raise CorruptWeights("the manifest gives a base without parcels, or parcels without a base")
        if manifest.parcels and (not self.base or manifest.base_policy_version != self.base.policy_version):
            raise CorruptWeights("a difference to a version came that is not held")
        if len({tensor.name for tensor in manifest.tensors}) != len(manifest.tensors):
            raise CorruptWeights("the manifest names a tensor twice")
        if weights.root_hash(manifest.tensors) != manifest.root_hash or manifest.root_hash != news.root_hash:
            raise CorruptWeights("the manifest's root hash is not that of its tensors, or not the announced one")
        try:
            return parcel_sizes(manifest)
        except ValueError as error:
            raise CorruptWeights(str(error)) from error

    async def _check(
        self,
        manifest: pb.WeightManifest,
        batch: Sequence[int],
        parcels: Sequence[np.ndarray],
        full: Shipment,
        relayed: Shipment | None,
    ) -> None:
        """Takes in the batch's tensors, up to the first that is wrong; raises CorruptWeights for that."""
        results = await asyncio.to_thread(self._build, manifest, batch, parcels)
        for parcel, result in zip(parcels, results, strict=True):
            if isinstance(result, CorruptWeights):
                raise result
            if full.arrived == len(self._arrays):  # else a sender before this one brought it
                full.add(weights.tensor_bytes(result).toreadonly())
            if relayed and relayed.arrived == len(self._arrays):
                relayed.add(parcel.data.toreadonly())
            self._arrays.append(result)

    def _build(
        self, manifest: pb.WeightManifest, batch: Sequence[int], parcels: Sequence[np.ndarray]
    ) -> list[np.ndarray | CorruptWeights]:
        # NumPy, zstd and xxHash release the interpreter, so that serving goes on meanwhile.
        base = {info.name: info for info in self.base.manifest.tensors} if self.base and manifest.parcels else {}
        results: list[np.ndarray | CorruptWeights] = []
        for index, parcel in zip(batch, parcels, strict=True):
            info = manifest.tensors[index]
            encoding = manifest.parcels[index].encoding if manifest.parcels else pb.TENSOR_ENCODING_FULL
            try:
                results.append(self._tensor(info, encoding, parcel, base.get(info.name)))
            except (CorruptWeights, ValueError) as error:
                results.append(CorruptWeights(f"{info.name}: {error}"))
        return results

    def _tensor(
        self, info: pb.TensorInfo, encoding: pb.TensorEncoding, parcel: np.ndarray, old: pb.TensorInfo | None
    ) -> np.ndarray:
        dtype, shape = weights.tensor_dtype(info.type), tuple(info.shape)
        if encoding == pb.TENSOR_ENCODING_FULL:
            data = parcel
        else:
            assert self.base, "a manifest with parcels was accepted"
            if old is None or (old.type, old.shape) != (info.type, info.shape):
                raise CorruptWeights("a difference came, but no such tensor is held")
            if encoding == pb.TENSOR_ENCODING_UNCHANGED:
                if old.hash != info.hash:
                    raise CorruptWeights("it is said to be unchanged, and is not")
                return self.base.tensors[info.name]
            if encoding != pb.TENSOR_ENCODING_DELTA:
                raise CorruptWeights(f"encoding {encoding} is unknown")
            held = np.frombuffer(weights.tensor_bytes(self.base.tensors[info.name]), np.uint8)
            data = delta.decode(parcel.data, held, word_bytes=dtype.itemsize)
        if weights.tensor_hash(data.data) != info.hash:
            raise CorruptWeights("its bytes do not have the hash that the manifest gives")
        return data.view(dtype).reshape(shape)


class _Chunks:
    """The rest of a call, parcel by parcel."""

    def __init__(
        self,
        manifest: pb.WeightManifest,
        call: grpc.aio.UnaryStreamCall,
        response: pb.GetWeightsResponse | None,
        silence_s: float,
    ):
        """
        Args:
            response: the one that has been read already.
        """
        self._names = [tensor.name for tensor in manifest.tensors]
        self._call, self._next, self._silence_s = call, response, silence_s

    async def read_into(self, index: int, parcel: np.ndarray) -> None:
        """Fills it with its chunks."""
        name, filled = self._names[index], 0
        while filled < parcel.size:
            # A peer sends a tensor on when it has all of it.
            response = self._next or await read(self._call, self._silence_s + parcel.size / _SLOWEST_BYTES_PER_S)
            self._next = None
            if response is None:
                raise CorruptWeights(f"{name}: the transfer ended after {filled} of {parcel.size} bytes")
            chunk = response.chunk
            end = filled + len(chunk.data)
            if response.WhichOneof("part") != "chunk" or chunk.tensor_index != index or chunk.offset != filled:
                raise CorruptWeights(f"{name}: expected its byte {filled}, something else came")
            if not chunk.data or end > parcel.size:
                raise CorruptWeights(f"{name}: a chunk is empty or passes its end")
            parcel[filled:end] = np.frombuffer(chunk.data, np.uint8)
            filled = end

    async def read_end(self) -> pb.GetWeightsResponse | None:
        """None, unless there is more."""
        if self._next is not None and self._next.WhichOneof("part") == "chunk":
            return self._next
        return await read(self._call, self._silence_s)


async def read(call: grpc.aio.UnaryStreamCall, silence_s: float) -> pb.GetWeightsResponse | None:
    """The next message, None at the end."""
    async with asyncio.timeout(silence_s):
        response = await call.read()
    return None if response is grpc.aio.EOF else response


def _batches(sizes: Sequence[int], first: int) -> Iterator[range]:
    """Runs of tensors from `first` on, each of about BATCH_BYTES."""
    start, size = first, 0
    for index in range(first, len(sizes)):
        if index > start and size + sizes[index] > BATCH_BYTES:
            yield range(start, index)
            start, size = index, 0
        size += sizes[index]
    if start < len(sizes):
        yield range(start, len(sizes))
