"""The puller against the trainer's real weight service: exact to the bit, whatever is cut, damaged or dropped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import ml_dtypes
import numpy as np
import pytest

from headrace.weight_service import WeightServicer
from tests.inference import fleet
from tests.inference.pulls import Engine, Tensors, meddled, pulling

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def odd_tensors(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "a.matrix": random.normal(size=(127, 31)).astype(np.float32),
        "b.scalar": np.array(random.normal(), np.float32),
        "c.empty": np.empty((0, 4), np.float32),
        "d.one": random.normal(size=1).astype(BFLOAT16),
        "e.prime": random.normal(size=4099).astype(BFLOAT16),
        "f.deep": random.normal(size=(3, 1, 5, 7)).astype(BFLOAT16),
        "g.empty": np.empty(0, BFLOAT16),
    }


def stepped(tensors: Tensors, seed: int) -> dict[str, np.ndarray]:
    """As a step leaves them: an element in a hundred differs, NaNs with payloads and zeros of both signs among them."""
    random, after = np.random.default_rng(seed), {}
    for name, array in tensors.items():
        new = array.copy()
        view = new.reshape(-1).view(f"<u{array.itemsize}")
        for _ in range(-(-array.size // 100)):
            view[random.integers(array.size)] ^= random.integers(1, 1 << 8 * array.itemsize - 1)
        after[name] = new
    after["e.prime"].view(np.uint16)[[3, 5, 7]] = [0x7FC1, 0x8000, 0xFFA5]
    after["a.matrix"].reshape(-1).view(np.uint32)[[3, 5, 7]] = [0x7FC00123, 0x80000000, 0xFF800001]
    return after


@pytest.mark.parametrize("chunk_bytes", [1024, 777, 1 << 20])
async def test_bit_identical_whatever_changes_and_however_it_is_cut(chunk_bytes):
    first = odd_tensors(1)
    second = stepped(first, 2)
    versions = {
        1: first,
        2: second,
        3: second,  # nothing changes
        4: odd_tensors(4),  # everything does
        5: {name: -array for name, array in odd_tensors(4).items()},  # every sign, zeros' too
        6: {name: array for name, array in odd_tensors(4).items() if name != "a.matrix"},
        7: stepped(odd_tensors(4), 7),
    }
    async with fleet.trainer(chunk_bytes=chunk_bytes) as trainer, pulling(trainer.address) as engine:
        for version, tensors in versions.items():
            trainer.publish(version, tensors)
            await engine.has(version, tensors)
            await fleet.all_watch(trainer, 1, held=version)
    assert engine.bytes["trainer", "full"] == sum(array.nbytes for array in first.values())
    assert engine.outcomes == {"ok": 7}
    assert not engine.causes


@pytest.mark.parametrize("bulk", [True, False])
async def test_large_tensors_come_beside_grpc_where_both_allow_it(bulk):
    random = np.random.default_rng(0)
    sizes = {"t0": 3_000_017, "t1": 1, "t2": 0, "t3": 5_000_011}
    first = {name: random.integers(0, 2**16, size, np.uint16).view(BFLOAT16) for name, size in sizes.items()}
    second = {name: array.copy() for name, array in first.items()}
    second["t3"].view(np.uint16)[::97] ^= 1
    async with fleet.trainer(bulk=bulk) as trainer, pulling(trainer.address) as engine:
        for version, tensors in ((1, first), (2, second)):
            trainer.publish(version, tensors)
            await engine.has(version, tensors)
            await fleet.all_watch(trainer, 1, held=version)
        assert (
            engine.versions[2].tensors["t0"] is engine.versions[1].tensors["t0"]
        )  # no second copy of what is the same
        full, delta = (trainer.engines.sent_bytes[kind] for kind in ("full", "delta"))
    assert full == sum(array.nbytes for array in first.values())
    assert delta < full / 50


@pytest.mark.parametrize("port", ["refuses", "hangs up", "is none"])
async def test_a_bulk_port_out_of_reach_is_done_without(port):
    tensors = {"t": np.arange(2_000_000, dtype=np.float32)}
    async with (
        fleet.trainer() as trainer,
        meddled(trainer.servicer) as (between, address),
        await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as hangs_up,
    ):
        ports = {"refuses": 1, "hangs up": hangs_up.sockets[0].getsockname()[1], "is none": 70_000}

        async def misdirect(request, response, abort):
            if response.WhichOneof("part") == "ticket":
                response.ticket.port = ports[port]

        between.meddle = misdirect
        async with pulling(address) as engine:
            trainer.publish(1, tensors)
            await engine.has(1, tensors)
            assert engine.causes == ["bulk"]
            trainer.publish(2, {"t": tensors["t"] + 1})
            await engine.has(2, {"t": tensors["t"] + 1})
            assert engine.causes == ["bulk"]
    assert [request.accepts_ticket for request in between.requests] == [True, False, False]


@pytest.mark.parametrize("delta_bases", [0, 1])
async def test_a_pull_may_be_cut_before_every_message(delta_bases):
    base = {name: odd_tensors(1)[name] for name in ("a.matrix", "b.scalar", "c.empty", "e.prime")}
    async with (
        fleet.trainer(delta_bases=delta_bases, chunk_bytes=200 if delta_bases else 2048) as trainer,
        meddled(trainer.servicer) as (between, address),
        pulling(address) as engine,
    ):
        trainer.publish(1, base)
        await engine.has(1, base)
        cuts, version = 0, 1
        while True:
            await fleet.all_watch(trainer, 1, held=version)
            version, sent, cut = version + 1, 0, False

            async def cut_once(request, response, abort):
                nonlocal sent, cut
                sent += 1
                if sent == cuts + 1 and not cut:  # noqa: B023 - awaited within the iteration
                    cut = True
                    await abort(grpc.StatusCode.UNAVAILABLE, "cut")

            between.meddle = cut_once
            tensors = stepped({**base, "a.matrix": base["a.matrix"]}, version)
            trainer.publish(version, tensors)
            await engine.has(version, tensors)
            if not cut:
                break
            cuts += 1
        last = between.requests[-2:]
    assert cuts >= (5 if delta_bases else 10)
    assert engine.outcomes["unavailable"] == cuts
    assert [request.HasField("base_policy_version") for request in last] == [True, True]


async def test_what_has_come_is_not_sent_again_after_a_cut():
    tensors = {f"t{n}": np.full(1_500_000, n, np.float32) for n in range(8)}
    async with fleet.trainer() as trainer, meddled(trainer.servicer) as (between, address):

        async def cut_once(request, response, abort):
            if not request.first_tensor and response.chunk.tensor_index == 5:
                await abort(grpc.StatusCode.UNAVAILABLE, "cut")

        between.meddle = cut_once
        async with pulling(address, bulk=False) as engine:
            trainer.publish(1, tensors)
            await engine.has(1, tensors)
        assert engine.outcomes == {"unavailable": 1, "ok": 1}
        assert [request.first_tensor for request in between.requests] == [0, 5]


async def test_a_damaged_difference_is_replaced_by_the_whole_version(caplog):
    first = odd_tensors(1)
    second = stepped(first, 2)
    async with fleet.trainer() as trainer, meddled(trainer.servicer) as (between, address), pulling(address) as engine:
        trainer.publish(1, first)
        await engine.has(1, first)
        await fleet.all_watch(trainer, 1, held=1)

        async def damage(request, response, abort):
            if request.HasField("base_policy_version") and response.chunk.tensor_index == 4 and response.chunk.data:
                data = bytearray(response.chunk.data)
                data[-1] ^= 64
                response.chunk.data = bytes(data)

        between.meddle = damage
        trainer.publish(2, second)
        await engine.has(2, second)
    assert engine.causes == ["delta"]
    assert engine.outcomes == {"ok": 2}
    assert "the difference to version 1 is damaged" in caplog.text
    assert [request.HasField("base_policy_version") for request in between.requests] == [False, True, False]


async def test_a_difference_that_leads_elsewhere_is_noticed():
    """The engine's own copy of the base is wrong: a bit of its memory has flipped."""
    first = odd_tensors(1)
    second = stepped(first, 2)
    async with fleet.trainer() as trainer, pulling(trainer.address) as engine:
        trainer.publish(1, first)
        await engine.has(1, first)
        engine.versions[1].tensors["e.prime"].view(np.uint16)[17] ^= 1
        await fleet.all_watch(trainer, 1, held=1)
        trainer.publish(2, second)
        await engine.has(2, second)
    assert engine.causes == ["delta"]


async def test_a_slow_reader_among_ten_publications_gets_its_version_whole():
    tensors = {f"t{n}": np.full(500_000, n, np.float32) for n in range(20)}
    async with (
        fleet.trainer(kept_versions=1, delta_bases=0) as trainer,
        meddled(trainer.servicer) as (between, address),
    ):
        go_on = asyncio.Event()

        async def dawdle(request, response, abort):
            if request.policy_version == 1 and response.chunk.tensor_index == 3:
                await go_on.wait()

        between.meddle = dawdle
        async with pulling(address, bulk=False) as engine:
            trainer.publish(1, tensors)
            async with asyncio.timeout(fleet.DEADLINE_S):
                while not between.requests:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            for version in range(2, 12):
                trainer.publish(version, {name: array + version for name, array in tensors.items()})
            assert trainer.store.in_memory == [1, 11]
            go_on.set()
            await engine.has(1, tensors)
            await engine.has(11, {name: array + 11 for name, array in tensors.items()})
    assert set(engine.versions) == {1, 11}


async def test_a_version_read_for_too_long_is_left_for_the_newest():
    tensors = {"a": np.ones(100, np.float32), "b": np.ones(100, np.float32)}
    async with (
        fleet.trainer(kept_versions=1, delta_bases=0, lease_s=1.0) as trainer,
        meddled(trainer.servicer) as (between, address),
    ):

        async def hang(request, response, abort):
            if request.policy_version == 1 and response.chunk.tensor_index == 1:
                trainer.publish(2, tensors)
                await asyncio.Event().wait()

        between.meddle = hang
        async with pulling(address) as engine:
            trainer.publish(1, tensors)
            await engine.has(2, tensors)
    assert engine.outcomes == {"gone": 1, "ok": 1}


@contextlib.asynccontextmanager
async def behind_a_peer(
    trainer: fleet.Service, meddle: Callable[..., Awaitable[None]] | None = None, *, run_id: str = "run"
) -> AsyncIterator[tuple[Engine, Engine]]:
    """A first engine that serves, through interference, and a second one that is told to ask it."""
    async with pulling(trainer.address, name="first") as first, contextlib.AsyncExitStack() as stack:
        await fleet.all_watch(trainer, 1)
        between, address = await stack.enter_async_context(meddled(WeightServicer(first.shelf, run_id=run_id)))
        between.meddle = meddle
        trainer.engines.enter("first", 0, address)  # as if it had said so itself
        second = await stack.enter_async_context(pulling(trainer.address, name="second"))
        await fleet.all_watch(trainer, 2)
        yield first, second


@pytest.mark.parametrize("serves_delta", [True, False])
async def test_a_peer_passes_on_what_came_to_it(serves_delta):
    first, second = odd_tensors(1), stepped(odd_tensors(1), 2)
    async with (
        fleet.trainer(delta_bases=int(serves_delta)) as trainer,
        pulling(trainer.address, name="one", serves=True) as one,
        pulling(trainer.address, name="two", serves=True) as two,
    ):
        await fleet.all_watch(trainer, 2)
        for version, tensors in ((1, first), (2, second)):
            trainer.publish(version, tensors)
            await one.has(version, tensors)
            await two.has(version, tensors)
            await fleet.all_watch(trainer, 2, held=version)
    kinds = {"full", "delta"} if serves_delta else {"full"}
    for engine in (one, two):
        assert {kind for _, kind in engine.bytes} == kinds
    assert {sender for sender, _ in one.bytes} != {sender for sender, _ in two.bytes}  # one from the trainer, one not
    assert not one.causes
    assert not two.causes


async def _damage(request, response, abort):
    if response.chunk.data:
        response.chunk.data = bytes([response.chunk.data[0] ^ 1]) + response.chunk.data[1:]


async def _wrong_version(request, response, abort):
    if response.HasField("manifest"):
        response.manifest.tensors[0].hash = "0" * 32


async def _gone(request, response, abort):
    await abort(grpc.StatusCode.NOT_FOUND, "never heard of it")


async def _dead(request, response, abort):
    if response.chunk.tensor_index == 1:
        await abort(grpc.StatusCode.UNAVAILABLE, "dead")


@pytest.mark.parametrize(
    ("meddle", "run_id", "cause"),
    [
        (_damage, "run", "corrupt"),
        (_wrong_version, "run", "corrupt"),
        (_gone, "run", "gone"),
        (_dead, "run", "dead"),
        (None, "other", "wrong_run"),
    ],
)
async def test_a_wrong_peer_is_left_for_the_trainer(meddle, run_id, cause):
    tensors = odd_tensors(1)
    async with fleet.trainer() as trainer, behind_a_peer(trainer, meddle, run_id=run_id) as (first, second):
        trainer.publish(1, tensors)
        await first.has(1, tensors)
        await second.has(1, tensors)
        assert set(second.causes) == {cause}
        assert second.outcomes == {"ok": 1}
        assert second.bytes["trainer", "full"] > 0
