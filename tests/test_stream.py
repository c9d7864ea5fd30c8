"""headrace.stream against a real redis-server."""

import asyncio

import pytest

from headrace import stream
from headrace.v1.trajectory_pb2 import PURPOSE_TRAINING, Task, TrajectoryGroup


def task(number: int) -> Task:
    return Task(task_id=f"{number:08d}", environment="e", split="train", index=number, purpose=PURPOSE_TRAINING)


def group(number: int, gateway: str = "a") -> TrajectoryGroup:
    return TrajectoryGroup(task=task(number), run_id="run", gateway=gateway)


@pytest.fixture
async def streams(redis_url):
    client = stream.connect(redis_url, timeout_s=5)
    await client.flushdb()
    streams = stream.Streams(client, "run", claim_timeout_s=0.2)
    await streams.open()
    yield streams
    await client.aclose()


async def test_a_ticket_becomes_one_group(streams):
    await streams.issue([task(0), task(1)], first_sequence=0)
    assert await streams.cursor() == 2
    assert await streams.ticket_count() == 2
    first, second = await streams.claim("a", 5, 0)
    assert [first.task, second.task] == [task(0), task(1)]
    assert await streams.publish(first.ticket_id, group(0))
    assert await streams.ticket_count() == 1
    (entry,) = await streams.read_groups(5, 0)
    assert TrajectoryGroup.FromString(entry.payload) == group(0)
    assert await streams.acknowledge_groups([entry.entry_id]) == 1
    assert await streams.acknowledge_groups([entry.entry_id]) == 0
    assert await streams.group_ids() == []


async def test_only_the_first_publication_counts(streams):
    await streams.issue([task(0)], first_sequence=0)
    (held,) = await streams.claim("a", 1, 0)
    await asyncio.sleep(0.25)  # the claim timeout itself is under test
    (taken,) = await streams.take_over("b", 1)
    assert taken == held
    assert await streams.keep_claims("a", [held.ticket_id]) == {held.ticket_id}
    assert await streams.publish(taken.ticket_id, group(0, "b"))
    assert not await streams.publish(held.ticket_id, group(0, "a"))
    assert [TrajectoryGroup.FromString(entry.payload).gateway for entry in await streams.read_groups(5, 0)] == ["b"]


async def test_a_kept_claim_is_not_taken_over(streams):
    await streams.issue([task(0)], first_sequence=0)
    (held,) = await streams.claim("a", 1, 0)
    for _ in range(4):
        await asyncio.sleep(0.1)
        assert await streams.keep_claims("a", [held.ticket_id]) == set()
    assert await streams.take_over("b", 1) == []


async def test_a_silent_claim_is_found_behind_many_that_are_kept(streams):
    await streams.issue([task(number) for number in range(101)], first_sequence=0)
    *kept, silent = await streams.claim("a", 101, 0)
    await asyncio.sleep(0.25)
    assert await streams.keep_claims("a", [ticket.ticket_id for ticket in kept]) == set()
    assert await streams.take_over("b", 4) == [silent]
    assert await streams.take_over("c", 4) == []


async def test_a_released_ticket_is_free_at_once(streams):
    await streams.issue([task(0), task(1)], first_sequence=0)
    mine, other = await streams.claim("a", 2, 0)
    await streams.release("a", [mine.ticket_id])
    assert [ticket.ticket_id for ticket in await streams.take_over("b", 5)] == [mine.ticket_id]
    await streams.release("b", [other.ticket_id])  # not b's: stays with a
    assert await streams.keep_claims("a", [other.ticket_id]) == set()


async def test_the_cursor_admits_one_trainer(streams):
    ids = await streams.issue([task(0), task(1)], first_sequence=0)
    assert await streams.issue([task(0), task(1)], first_sequence=0) == ids  # a repeated call after a lost reply
    assert await streams.ticket_count() == 2
    with pytest.raises(stream.CursorMoved):
        await streams.issue([task(1)], first_sequence=1)
    await streams.advance_cursor(10)
    await streams.advance_cursor(3)
    assert await streams.cursor() == 10
    await streams.issue([task(10)], first_sequence=10)


async def test_versions_are_never_reused(streams):
    assert await streams.reserve_version(1) == 1
    assert await streams.reserve_version(1) == 2
    assert await streams.reserve_version(9) == 9
    assert await streams.reserve_version(3) == 10


async def test_unacknowledged_groups_are_delivered_again(streams):
    await streams.issue([task(n) for n in range(3)], first_sequence=0)
    for ticket in await streams.claim("a", 3, 0):
        await streams.publish(ticket.ticket_id, group(ticket.task.index))
    first, second = await streams.read_groups(2, 0)
    await streams.acknowledge_groups([first.entry_id])
    assert await streams.read_groups(9, 0, after="0") == [second]
    (third,) = await streams.read_groups(9, 0)
    assert await streams.read_groups(9, 0, after="0") == [second, third]
    assert await streams.read_groups(9, 0, after=second.entry_id) == [third]


async def test_a_dead_letter_keeps_payload_and_reason(streams):
    await streams.issue([task(0)], first_sequence=0)
    (ticket,) = await streams.claim("a", 1, 0)
    await streams.publish(ticket.ticket_id, group(0))
    (entry,) = await streams.read_groups(1, 0)
    await streams.dead_letter(entry, "reward is nan")
    assert await streams.dead_letters() == [(entry.entry_id, "reward is nan")]
    assert await streams.group_ids() == []


async def test_a_malformed_ticket_is_claimed_with_its_defect(streams, redis_url):
    client = stream.connect(redis_url, timeout_s=5)
    await client.xadd("headrace:{run}:tasks", {"record": b"\xff\xff"})
    await client.xadd("headrace:{run}:tasks", {"other": b""})
    await client.xadd("headrace:{run}:tasks", {"record": Task(task_id="x").SerializeToString()})
    assert all(ticket.defect for ticket in await streams.claim("a", 9, 0))
    await client.aclose()


async def test_two_runs_share_a_server(streams, redis_url):
    client = stream.connect(redis_url, timeout_s=5)
    other = stream.Streams(client, "other", claim_timeout_s=0.2)
    await other.open()
    await streams.issue([task(0)], first_sequence=0)
    assert await other.claim("a", 9, 0) == []
    assert await other.cursor() == 0
    await client.aclose()


async def test_publications_race_to_one_winner(streams):
    await streams.issue([task(0)], first_sequence=0)
    (ticket,) = await streams.claim("a", 1, 0)
    outcomes = await asyncio.gather(*(streams.publish(ticket.ticket_id, group(0, f"g{n}")) for n in range(20)))
    assert outcomes.count(True) == 1
    assert len(await streams.group_ids()) == 1
