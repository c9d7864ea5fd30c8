"""Evaluation beside training: what it tells, and that training never waits for it."""

import json
import math

import pytest

from headrace import config
from headrace.v1 import trajectory_pb2 as pb
from services.trainer.evaluation import pass_at, summary
from tests.trainer import rig
from tests.trainer.gateway import group, ordinary, trajectory

pytestmark = pytest.mark.timeout(400)


def test_pass_at_k_by_hand():
    # Two of four, none of four. k = 2: 1 - C(2,2) / C(4,2) = 5/6. k = 4: 1.
    found = pass_at([[1, 1, 0, 0], [0, 0, 0.5, 0]], success_reward=1.0)
    assert found == pytest.approx({1: 0.25, 2: 5 / 12, 4: 0.5})
    assert pass_at([[1, 0, 1], [1, 1, 1]], success_reward=0.5) == pytest.approx({1: 5 / 6, 2: 1.0})
    assert pass_at([], success_reward=1.0) == {}


def test_an_error_is_counted_and_is_no_reward():
    task = pb.Task(task_id="1", environment="a", split="test")
    failed = trajectory("z", reward=None, status=pb.EPISODE_STATUS_ENVIRONMENT_ERROR)
    both = [
        group(task, [trajectory("x", reward=1, versions=(2, 3)), failed]),
        group(task, [trajectory("y", reward=0, versions=(3, 5))]),
    ]
    told = summary(both, 7, "a", config.Evaluation(), tasks=3)
    assert (told.episodes, told.failed, told.reward_mean, told.complete) == (2, 1, 0.5, False)
    assert (told.oldest_version, told.newest_version) == (2, 5)
    nothing = summary([group(task, [failed])], 7, "a", config.Evaluation(), tasks=1)
    assert (nothing.reward_mean, nothing.failed, nothing.oldest_version, nothing.pass_at) == (None, 1, None, {})


def evaluations(trainer):
    return [json.loads(line) for line in (trainer.run / "evaluation.jsonl").read_text().splitlines()]


EVALUATION = {"every_steps": 2, "tasks": 3, "final_timeout_s": 60}


async def test_the_same_tasks_every_so_many_steps(streams, redis_url, tmp_path):
    seen = []

    def answer(ticket, version):
        if ticket.task.purpose == pb.PURPOSE_EVALUATION:
            seen.append((ticket.task.split, ticket.task.index, ticket.task.seed))
            return ordinary(ticket.task, version=version, rewards=[1, 0])
        return rig.ordinary_answer(ticket, version)

    with rig.trainer(rig.run_file(tmp_path, redis_url, steps=5, evaluation=EVALUATION)) as trainer:
        async with rig.serving(streams, answer):
            assert await trainer.ended() == 0
    told = evaluations(trainer)
    assert [line["step"] for line in told] == [0, 2, 4]
    for line in told:
        assert (line["environment"], line["split"], line["tasks"], line["episodes"]) == ("a", "test", 3, 6)
        assert (line["reward_mean"], line["pass_at"], line["complete"]) == (0.5, {"1": 0.5, "2": 1.0}, True)
    assert len(seen) == 9
    assert seen[:3] == seen[3:6] == seen[6:]
    assert {index for _, index, _ in seen} == {0, 1, 2}
    assert [line["step"] for line in trainer.lines("metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert all(line["reward_mean"] == 0.5 for line in trainer.lines("metrics.jsonl"))
    assert trainer.returned == []
    assert await streams.group_ids() == []


async def test_training_does_not_wait_for_an_evaluation_that_fails_or_never_comes(streams, redis_url, tmp_path):
    def answer(ticket, version):
        if ticket.task.purpose != pb.PURPOSE_EVALUATION:
            return rig.ordinary_answer(ticket, version)
        if ticket.task.index == 0:
            return ordinary(ticket.task, version=version, rewards=[0, math.nan])  # a malformed record
        failed = [trajectory(n, reward=None, status=pb.EPISODE_STATUS_ENVIRONMENT_ERROR) for n in "xy"]
        return group(ticket.task, failed)

    settings = {"every_steps": 1, "tasks": 2, "final_timeout_s": 0.1}
    with rig.trainer(rig.run_file(tmp_path, redis_url, steps=4, evaluation=settings)) as trainer:
        async with rig.serving(streams, answer):
            assert await trainer.ended() == 0
    told = evaluations(trainer)
    assert [line["step"] for line in told] == sorted(line["step"] for line in told)
    assert told[0]["step"] == 0
    assert {line["reward_mean"] for line in told} == {None}
    assert [line["step"] for line in trainer.lines("metrics.jsonl")] == [1, 2, 3, 4]
    assert len(trainer.consumed) == 8


async def test_evaluation_tickets_hold_no_training_ticket_back(streams, redis_url, tmp_path):
    with rig.trainer(rig.run_file(tmp_path, redis_url, evaluation={"every_steps": 1, "tasks": 5})) as trainer:
        await rig.eventually(streams.ticket_count, 9)
        await trainer.until(lambda status: status.outstanding_tickets == 4)
        gateway = rig.Gateway(streams)
        tickets = await gateway.claim(9)
        assert sum(ticket.task.purpose == pb.PURPOSE_EVALUATION for ticket in tickets) == 5
