"""services.trainer.task_order: the order is a function of seed and number."""

from collections import Counter

import pytest

from headrace.v1.trajectory_pb2 import Task
from services.trainer.task_order import TaskOrder, TaskSource, sequence_number, task_id

DRAWN = TaskSource(split="train", weight=1.0, task_count=None)


def test_any_number_can_be_asked_for_at_any_time():
    sources = {"a": DRAWN, "b": TaskSource(split="test", weight=3.0, task_count=7)}
    forward = [TaskOrder(sources, seed=1).task(n) for n in range(5000)]
    order = TaskOrder(sources, seed=1)
    assert [order.task(n) for n in (4999, 17, 4097, 0)] == [forward[n] for n in (4999, 17, 4097, 0)]
    assert TaskOrder(sources, seed=2).task(0) != forward[0]


def test_environments_come_by_weight():
    order = TaskOrder({"a": DRAWN, "b": TaskSource(split="train", weight=3.0, task_count=None)}, seed=0)
    counts = Counter(order.task(n).environment for n in range(4000))
    assert counts["b"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_each_epoch_visits_every_task_once_in_its_own_order():
    order = TaskOrder({"a": TaskSource(split="train", weight=1.0, task_count=50)}, seed=0)
    epochs = [[order.task(50 * epoch + n).index for n in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_two_environments_walk_their_own_epochs():
    source = TaskSource(split="train", weight=1.0, task_count=10)
    order = TaskOrder({"a": source, "b": source}, seed=0)
    tasks = [order.task(n) for n in range(200)]
    for name in "ab":
        indices = [task.index for task in tasks if task.environment == name][:20]
        assert sorted(indices) == sorted([*range(10), *range(10)])


def test_drawn_tasks_differ_in_seed():
    order = TaskOrder({"a": DRAWN}, seed=0)
    assert len({order.task(n).seed for n in range(1000)}) == 1000


def test_a_task_id_tells_its_number():
    assert sequence_number(Task(task_id=task_id(123))) == 123
    for strange in ("x", "123", "-0000001", ""):
        with pytest.raises(ValueError):
            sequence_number(Task(task_id=strange))
