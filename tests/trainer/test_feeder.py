"""services.trainer.feeder against a real Redis."""

import pytest

from headrace import stream
from headrace.errors import StartupError
from headrace.v1.trajectory_pb2 import PURPOSE_TRAINING
from services.trainer.feeder import Feeder
from services.trainer.journal import Journal
from services.trainer.ledger import Consumed, Ledger
from services.trainer.lineage import Lineage
from services.trainer.status import Status
from services.trainer.task_order import TaskOrder, TaskSource
from tests.trainer.gateway import RUN_ID, Gateway, ordinary

SOURCES = {"a": TaskSource(split="train", weight=1.0, task_count=None)}


def feeder(streams, tmp_path, limit=4):
    ledger = Ledger(Journal(tmp_path / "consumed.jsonl"))
    lineage = Lineage({1: 1})
    status = Status(RUN_ID, total_steps=5)
    order = TaskOrder(SOURCES, seed=0)
    return Feeder(streams, order, ledger, lineage, status, groups_per_step=limit, max_staleness=0), ledger


async def test_tickets_go_out_up_to_the_limit_in_order(streams, tmp_path):
    subject, _ = feeder(streams, tmp_path)
    await subject.open(at_least=0)
    assert await subject.top_up() == 4
    assert await subject.top_up() == 0
    tasks = [ticket.task for ticket in await Gateway(streams).claim(4)]
    assert [task.task_id for task in tasks] == ["00000000", "00000001", "00000002", "00000003"]
    assert {(task.purpose, task.min_policy_version) for task in tasks} == {(PURPOSE_TRAINING, 1)}
    assert await subject.top_up() == 0  # claimed is outstanding


async def test_a_group_is_outstanding_until_its_step_is_done(streams, tmp_path):
    subject, ledger = feeder(streams, tmp_path)
    await subject.open(at_least=0)
    await subject.top_up()
    gateway = Gateway(streams)
    (ticket,) = await gateway.claim(1)
    await gateway.publish(ticket, ordinary(ticket.task, version=1))
    (entry,) = await streams.read_groups(1, 0)
    assert await subject.top_up() == 0
    group = Consumed(entry.entry_id, ticket.task.task_id, 1, oldest_version=1, newest_version=1, age_max=0)
    ledger.learn(1, [group], policy_version=1)
    assert await subject.top_up() == 1
    await streams.acknowledge_groups([entry.entry_id])
    ledger.forget([entry.entry_id])
    assert await subject.top_up() == 0
    assert await subject.outstanding() == 4


@pytest.mark.parametrize(("redis_cursor", "checkpoint_cursor", "expected"), [(8, 4, 8), (8, 20, 20)])
async def test_a_restart_goes_on_where_redis_or_the_checkpoint_is(
    streams, tmp_path, redis_cursor, checkpoint_cursor, expected
):
    first, _ = feeder(streams, tmp_path, limit=redis_cursor)
    await first.open(at_least=0)
    await first.top_up()
    uninterrupted = TaskOrder(SOURCES, seed=0)
    second, _ = feeder(streams, tmp_path, limit=redis_cursor + 3)
    await second.open(at_least=checkpoint_cursor)
    assert await second.top_up() == 3
    numbers = [*range(redis_cursor), *range(expected, expected + 3)]
    tickets = await Gateway(streams).claim(len(numbers))
    assert [(int(t.task.task_id), t.task.index, t.task.seed) for t in tickets] == [
        (n, uninterrupted.task(n).index, uninterrupted.task(n).seed) for n in numbers
    ]


async def test_two_trainers_of_one_run_are_told(streams, tmp_path):
    first, _ = feeder(streams, tmp_path)
    second, _ = feeder(streams, tmp_path, limit=5)
    await first.open(at_least=0)
    await second.open(at_least=0)
    await first.top_up()
    with pytest.raises(StartupError, match="another trainer"):
        await second.top_up()


async def test_a_redis_without_its_memory_is_told_where_the_run_is(streams, redis_url, tmp_path):
    subject, ledger = feeder(streams, tmp_path)
    await subject.open(at_least=0)
    await subject.top_up()
    gateway = Gateway(streams)
    for ticket in await gateway.claim(3):
        await gateway.publish(ticket, ordinary(ticket.task, version=1))
    learned, *begun = await streams.read_groups(3, 0)
    consumed = Consumed(learned.entry_id, "", 1, oldest_version=1, newest_version=1, age_max=0)
    ledger.learn(1, [consumed], policy_version=1)
    ledger.take(entry.entry_id for entry in begun)
    assert await subject.top_up() == 1
    client = stream.connect(redis_url, timeout_s=5)
    await client.flushdb()
    await client.aclose()
    assert await subject.top_up() == 2  # the two that were begun will still be learned from
    assert await subject.outstanding() == 4
    assert ledger.waiting_ids == []
    tickets = await Gateway(streams).claim(2)
    assert [ticket.task.task_id for ticket in tickets] == ["00000005", "00000006"]


async def test_the_last_steps_are_given_no_more_than_they_consume(streams, tmp_path):
    status = Status(RUN_ID, total_steps=3, step=1)
    ledger = Ledger(Journal(tmp_path / "consumed.jsonl"))
    order = TaskOrder(SOURCES, seed=0)
    subject = Feeder(streams, order, ledger, Lineage({1: 1}), status, groups_per_step=4, max_staleness=3)
    assert await subject.top_up() == 8
