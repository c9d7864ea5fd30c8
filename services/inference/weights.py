"""The weight puller: keeps the engine on the trainer's newest version.

One loop, for ever: watch until the trainer announces a version newer than the one held; get it, from the peers that the
trainer names or from itself, as the difference to the one held or whole; check every tensor and the whole against the
announced hashes; hand it to `install`, which stages it and returns once it is swapped in. Then watch again, so that the
trainer hears which version this engine holds.

Blocks on the trainer. The trainer may be absent, start later, restart or vanish in the middle: the puller tries again
with growing pauses, and the engine serves what it holds meanwhile. A peer that fails, dawdles or sends something wrong
is left for the next sender. When all that were named have failed, the trainer is told and names others, so that the
children of an engine that died do not all come to it; in the end it sends itself. A difference that does not lead to
the announced hashes is replaced by the whole version. A version that the trainer no longer keeps is passed over for the
next; a version that is not newer, or another run's, is refused.

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

from headrace import address, rpc
from headrace.security import PLAIN, Security
from headrace.v1 import trainer_service_pb2 as pb
from services.inference.shelf import HeldWeights, Shelf
from services.inference.transfer import BulkUnreachable, CorruptWeights, Sender, Transfer

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_SILENCE_S = 60.0  # a trainer from which nothing comes for so long has failed
_PEER_SILENCE_S = 20.0
_MOST_QUESTIONS = 2  # for other peers, after all that were named have failed; then the trainer sends

_GONE = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ABORTED)
_CAUSES = {
    grpc.StatusCode.NOT_FOUND: "gone",
    grpc.StatusCode.ABORTED: "gone",
    grpc.StatusCode.FAILED_PRECONDITION: "wrong_run",
}


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
    """What wants to know how pulls go."""

    def pulled(self, outcome: str, seconds: float) -> None:
        """A pull ended after so many seconds: "ok", "corrupt", "gone", "unavailable" or "wrong_run"."""

    def received(self, sender: str, kind: str, size_bytes: int) -> None:
        """So much came from "trainer" or "peer", of a "full" version or of a "delta"."""

    def fell_back(self, cause: str) -> None:
        """Something failed, and the next thing is tried: see Puller."""


class _PeerFailed(Exception):
    def __init__(self, cause: str):
        super().__init__(cause)
        self.cause = cause


class _PeersFailed(Exception):
    pass


class Puller:
    """Pulls versions of one run from one trainer and its peers.

    Causes of a fall-back: a peer that is "dead", "slow", "corrupt", of the "wrong_run", or whose version is "gone"; a
    "delta" that was wrong; "bulk", a port that cannot be reached.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        engine: str,
        run_id: str,
        install: Callable[[Version], Awaitable[None]],
        observer: PullObserver,
        hold: Hold,
        shelf: Shelf | None = None,
        keeps: bool = True,
        trainer_host: str = "",
        serving_address: str = "",
        security: Security = PLAIN,
        peer_name: str = "",
    ):
        """
        Args:
            shelf: what peers are served from.
            keeps: whether the weights stay on the host, for differences and peers; else every version comes whole.
            trainer_host: where the trainer's bulk port is; "" for all bytes over the channel.
            serving_address: where peers reach the shelf, as in WatchWeightsRequest; "" for nowhere.
            security: what to ask of peers and to show them. Under TLS all bytes come over gRPC.
            peer_name: the host that the certificates of engines are for; peers are found by their addresses.
        """
        self._trainer = Sender(channel, kind="trainer", host="" if security.tls else trainer_host, silence_s=_SILENCE_S)
        self._engine = engine
        self._run_id = run_id
        self._install = install
        self._observer = observer
        self._hold = hold
        self._shelf = shelf or Shelf()
        self._keeps = keeps
        self._serving_address, self._security, self._peer_name = serving_address, security, peer_name
        self._held: int | None = None
        self._transfer: Transfer | None = None

    async def run(self) -> None:
        """Pulls for ever. Raises what `install` raises: weights that do not fit the model will not fit later either."""
        pause_s = _FIRST_PAUSE_S
        while True:
            start_s = time.monotonic()
            try:
                version = await self._next_version()
            except _PeersFailed:
                continue  # the trainer is told, and names others
            except CorruptWeights as error:
                outcome = "corrupt"
                self._transfer = None
                log.error("weights are damaged, pulling them again: %s", error)
            except grpc.aio.AioRpcError as error:
                outcome = "gone" if error.code() in _GONE else "unavailable"
                refused = error.code() == grpc.StatusCode.UNAUTHENTICATED
                level = logging.ERROR if refused else logging.INFO
                log.log(
                    level if pause_s == _FIRST_PAUSE_S else logging.DEBUG,
                    "no weights from the trainer for now: %s %s",
                    error.code().name,
                    error.details(),
                )
            except OSError as error:  # TimeoutError is one
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
        request = pb.WatchWeightsRequest(engine=self._engine, serving_address=self._serving_address)
        if self._held is not None:
            request.held_policy_version = self._held
        if self._transfer:
            request.failed_peers.extend(self._transfer.failed_peers)
        watch = self._trainer.stub.WatchWeights(request, wait_for_ready=True)
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
        """The announced version, from whoever has it."""
        if not (self._transfer and self._transfer.is_of(news)):
            self._transfer = Transfer(news, self._shelf, self._shelf.held, self._observer.received)
        transfer = self._transfer
        fresh = [peer for peer in news.peers if peer.address not in transfer.failed_peers]
        for peer in fresh:
            try:
                weights = await self._get_from_peer(transfer, peer)
                break
            except _PeerFailed as failure:
                transfer.failed_peers.append(peer.address)
                self._observer.fell_back(failure.cause)
        else:
            if fresh and transfer.questions < _MOST_QUESTIONS:
                transfer.questions += 1
                raise _PeersFailed
            weights = await self._get_from_trainer(transfer)
        self._transfer = None
        if self._keeps:
            self._shelf.hold(weights)
        else:
            self._shelf.drop(news.policy_version)
        return Version(news.run_id, news.policy_version, weights.manifest.root_hash, weights.tensors)

    async def _get_from_peer(self, transfer: Transfer, peer: pb.WeightPeer) -> HeldWeights:
        """What is missing, from this peer. Raises _PeerFailed, whatever it is that fails."""
        try:
            host, _ = address.split(peer.address)
        except ValueError as error:
            raise _PeerFailed("dead") from error
        async with rpc.channel(peer.address, security=self._security, name=self._peer_name) as channel:
            sender = Sender(channel, kind="peer", host="" if self._security.tls else host, silence_s=_PEER_SILENCE_S)
            try:
                try:
                    return await transfer.receive(sender)
                except BulkUnreachable as error:
                    self._observer.fell_back("bulk")
                    log.info("the bulk port of peer %s cannot be reached: %s", peer.address, error)
                    return await transfer.receive(sender)
            except CorruptWeights as error:
                log.error("peer %s sends damaged weights: %s", peer.address, error)
                raise _PeerFailed("corrupt") from error
            except grpc.aio.AioRpcError as error:
                log.info("peer %s failed: %s %s", peer.address, error.code().name, error.details())
                raise _PeerFailed(_CAUSES.get(error.code(), "dead")) from error
            except (BulkUnreachable, OSError) as error:
                log.info("peer %s failed: %s", peer.address, error or "it sent nothing for a while")
                raise _PeerFailed("slow" if isinstance(error, TimeoutError) else "dead") from error

    async def _get_from_trainer(self, transfer: Transfer) -> HeldWeights:
        """What is missing, in one way or another. Raises as Transfer.receive does."""
        while True:
            try:
                return await transfer.receive(self._trainer)
            except BulkUnreachable as error:
                self._observer.fell_back("bulk")
                log.warning("the trainer's bulk port cannot be reached, its bytes come over gRPC: %s", error)
            except CorruptWeights as error:
                if not transfer.base:
                    raise
                self._observer.fell_back("delta")
                base = transfer.base.policy_version
                log.error("the difference to version %d is damaged, pulling the whole version: %s", base, error)
                transfer.base = None
