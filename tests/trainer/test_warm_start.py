"""The warm start through a real trainer process; the test is its gateway."""

import pytest

from headrace import stream
from headrace.v1 import trajectory_pb2 as pb
from tests.trainer import rig
from tests.trainer.gateway import Gateway, demonstrated, group, ordinary, trajectory

pytestmark = pytest.mark.timeout(400)  # a busy machine may take a minute to import and compile

WARM_START = {
    "environment": "a",
    "demonstrations": 6,
    "batch_size": 4,
    "max_updates": 6,
    "evaluate_every": 2,
    "evaluation_episodes": 4,
    "stop_at_reward": 0.5,
}


class Expert:
    """Answers any ticket and remembers it; evaluations earn what `rewards` says, one after the other."""

    def __init__(self, rewards=(1.0,)):
        self.tasks = []
        self._rewards = iter([reward for reward in rewards for _ in range(2)])  # two tickets make an evaluation

    def __call__(self, ticket, version):
        task = ticket.task
        self.tasks.append(task)
        if task.purpose == pb.PURPOSE_DEMONSTRATION:
            return demonstrated(task)
        if task.purpose == pb.PURPOSE_EVALUATION:
            return ordinary(task, version=version, rewards=[next(self._rewards)] * 2)
        return ordinary(task, version=version)

    def numbers(self, purpose):
        """Ticket numbers of one purpose, in order."""
        return [int(task.task_id) for task in self.tasks if task.purpose == purpose]


async def test_it_imitates_until_its_own_episodes_earn_enough(streams, redis_url, tmp_path):
    expert = Expert(rewards=(0.0, 0.75))
    with rig.trainer(rig.run_file(tmp_path, redis_url, steps=2, warm_start=WARM_START)) as trainer:
        async with rig.serving(streams, expert):
            assert await trainer.ended() == 0
    assert expert.numbers(pb.PURPOSE_DEMONSTRATION) == [0, 1, 2, 3, 4, 5]
    assert expert.numbers(pb.PURPOSE_EVALUATION) == [6, 7, 8, 9]
    assert [task.min_policy_version for task in expert.tasks[6:10]] == [2, 2, 3, 3]
    assert [int(group["task_id"]) for group in trainer.consumed] == [10, 11, 12, 13]
    assert [line["policy_version"] for line in trainer.lines("consumed.jsonl")] == [3, 4]
    assert (trainer.run / "checkpoints" / "0").is_dir()


async def test_it_goes_on_without_the_reward_when_its_updates_are_used_up(streams, redis_url, tmp_path):
    expert = Expert(rewards=(0.0, 0.0, 0.0))
    with rig.trainer(rig.run_file(tmp_path, redis_url, steps=1, warm_start=WARM_START)) as trainer:
        async with rig.serving(streams, expert):
            assert await trainer.ended() == 0
        assert "was not reached in 6 updates" in trainer.process.output
    assert len(expert.numbers(pb.PURPOSE_EVALUATION)) == 6


async def test_what_fails_is_asked_for_again(streams, redis_url, tmp_path):
    expert = Expert()

    def answer(ticket, version):
        good = expert(ticket, version)
        if int(ticket.task.task_id) == 2:
            return group(ticket.task, [trajectory("x", reward=None, status=pb.EPISODE_STATUS_ENVIRONMENT_ERROR)])
        return good

    with rig.trainer(rig.run_file(tmp_path, redis_url, steps=1, warm_start=WARM_START)) as trainer:
        async with rig.serving(streams, answer):
            # The failed episode has tokens and no logprobs of a demonstration's.
            assert await trainer.ended() == 0
    assert expert.numbers(pb.PURPOSE_DEMONSTRATION) == [0, 1, 2, 3, 4, 5, 6]


async def test_a_redis_that_loses_its_memory_is_asked_again(streams, redis_url, tmp_path):
    expert = Expert()
    with rig.trainer(rig.run_file(tmp_path, redis_url, steps=1, warm_start=WARM_START)) as trainer:
        await Gateway(streams).claim(6)
        client = stream.connect(redis_url, timeout_s=5)
        await client.flushdb()
        await client.aclose()
        await streams.open()
        async with rig.serving(streams, expert):
            assert await trainer.ended() == 0
    assert expert.numbers(pb.PURPOSE_DEMONSTRATION) == [6, 7, 8, 9, 10, 11]


async def test_killed_in_the_middle_it_begins_again_and_drops_what_is_left_over(streams, redis_url, tmp_path):
    config = rig.run_file(tmp_path, redis_url, steps=2, warm_start=WARM_START)
    with rig.trainer(config) as trainer:
        gateway = Gateway(streams)
        tickets = await gateway.claim(6)
        for ticket in tickets[:3]:
            await gateway.publish(ticket, demonstrated(ticket.task))
        await trainer.until(lambda status: status.policy_version == 1)
        trainer.process.kill()
        for ticket in tickets[3:]:
            await gateway.publish(ticket, demonstrated(ticket.task))
        unread = len(await streams.group_ids())
        expert = Expert()
        trainer.process.start()
        async with rig.serving(streams, expert):
            assert await trainer.ended() == 0
    assert expert.numbers(pb.PURPOSE_DEMONSTRATION) == [6, 7, 8, 9, 10, 11]
    assert [int(group["task_id"]) for group in trainer.consumed] == [14, 15, 16, 17]
    assert trainer.lines("metrics.jsonl")[-1]["returned_groups/left_over"] == unread
    assert await streams.ticket_count() == 0
    assert await streams.group_ids() == []
