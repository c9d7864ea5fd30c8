"""A killed trainer: what it had not made durable is learned once, nothing is learned twice, nothing is lost."""

import json

import numpy as np
import pytest

from headrace import stream
from headrace.v1 import trainer_service_pb2 as pb
from services.trainer.insist import insist
from tests import processes
from tests.trainer import rig
from tests.trainer.gateway import RUN_ID, Gateway, group, ordinary, trajectory

pytestmark = pytest.mark.timeout(400)  # a busy machine may take a minute to import and compile


async def publish(gateway, count):
    """Ends so many tickets, as they come."""
    for _ in range(count):
        (ticket,) = await gateway.claim(1)
        await gateway.publish(ticket, ordinary(ticket.task, version=ticket.task.min_policy_version))


async def killed_at_step_3(trainer, streams):
    """Kills a trainer that has made step 2 durable and step 3 not; returns what it had consumed."""
    await publish(Gateway(streams), 6)
    await trainer.until(lambda status: status.step == 3)
    await rig.eventually(streams.group_count, 2)  # the checkpoint is written in the background
    trainer.process.kill()
    assert (trainer.run / "checkpoints" / "2").is_dir()
    assert len(await streams.group_ids()) == 2
    return trainer.lines("consumed.jsonl")


async def account(trainer, streams):
    """Asserts that every ticket number has exactly one end, or is still out."""
    consumed = [int(group["task_id"]) for group in trainer.consumed]
    returned = [int(group["task_id"]) for group in trainer.returned]
    assert len(set(consumed)) == len(consumed)
    assert not set(consumed) & set(returned)
    out = await streams.ticket_count() + await streams.group_count()
    assert len(consumed) + len(set(returned)) + out == await streams.cursor()


async def test_uncommitted_groups_are_learned_again_and_committed_ones_are_not(streams, redis_url, tmp_path):
    with rig.trainer(rig.run_file(tmp_path, redis_url, steps=6)) as trainer:
        before = await killed_at_step_3(trainer, streams)
        versions = [line["policy_version"] for line in trainer.lines("metrics.jsonl")]
        trainer.process.start()
        await trainer.until(lambda status: status.step == 3)
        after = trainer.lines("consumed.jsonl")
        assert [[g["entry_id"] for g in line["groups"]] for line in after] == [
            [g["entry_id"] for g in line["groups"]] for line in before
        ]
        assert after[2]["policy_version"] > max(versions)  # the restored weights have a number of their own
        async with rig.serving(streams):
            assert await trainer.ended() == 0
    assert [line["step"] for line in trainer.lines("metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert trainer.lines("metrics.jsonl")[2]["policy_version"] > max(versions)
    await account(trainer, streams)


async def test_groups_that_a_checkpoint_has_learned_are_only_acknowledged(streams, redis_url, tmp_path):
    with rig.trainer(rig.run_file(tmp_path, redis_url, steps=6)) as trainer:
        await killed_at_step_3(trainer, streams)
        # As if it had died between making the checkpoint durable and acknowledging.
        notes = next((trainer.run / "checkpoints" / "2" / "notes").iterdir())
        value = json.loads(notes.read_text())
        learned = await streams.group_ids()
        notes.write_text(json.dumps(value | {"learned_ids": value["learned_ids"] + learned}))
        trainer.process.start()
        await trainer.until(lambda status: status.phase == pb.TRAINER_PHASE_WAITING)
        assert await streams.group_ids() == []
        await publish(Gateway(streams), 2)
        await trainer.until(lambda status: status.step == 3)
        assert not {group["entry_id"] for group in trainer.consumed} & set(learned)


async def test_without_a_checkpoint_the_run_begins_again_from_its_groups(streams, redis_url, tmp_path):
    config = rig.run_file(tmp_path, redis_url, steps=4, checkpoint={"every_steps": 100})
    with rig.trainer(config) as trainer:
        await publish(Gateway(streams), 2)
        await trainer.until(lambda status: status.step == 1)
        (before,) = trainer.lines("consumed.jsonl")
        trainer.process.kill()
        trainer.process.start()
        async with rig.serving(streams):
            assert await trainer.ended() == 0
    first = trainer.lines("consumed.jsonl")[0]
    assert [g["entry_id"] for g in first["groups"]] == [g["entry_id"] for g in before["groups"]]
    assert first["policy_version"] == 3
    await account(trainer, streams)


async def test_a_torn_checkpoint_is_not_taken(streams, redis_url, tmp_path):
    with rig.trainer(rig.run_file(tmp_path, redis_url, steps=4)) as trainer:
        await killed_at_step_3(trainer, streams)
        torn = trainer.run / "checkpoints" / "3.orbax-checkpoint-tmp-0"
        (torn / "state").mkdir(parents=True)
        trainer.process.start()
        await trainer.until(lambda status: status.step == 3)
        async with rig.serving(streams):
            assert await trainer.ended() == 0
    await account(trainer, streams)


async def test_outstanding_tickets_stay_bounded_after_a_restart(streams, redis_url, tmp_path):
    with rig.trainer(rig.run_file(tmp_path, redis_url, steps=50)) as trainer:
        await killed_at_step_3(trainer, streams)
        trainer.process.start()
        await trainer.until(lambda status: status.step == 3)
        await rig.eventually(streams.ticket_count, 4)
        await trainer.until(lambda status: status.outstanding_tickets == 4)
        assert await streams.ticket_count() == 4


def by_ticket(ticket, version):
    """Tokens and rewards that only the ticket decides."""
    drawn = np.random.default_rng(int(ticket.task.task_id))
    trajectories = [
        trajectory(
            f"{ticket.task.task_id}/{number}",
            reward=float(drawn.integers(0, 3)),
            action=(int(drawn.integers(3, 9)), 2),
            versions=(version, version),
        )
        for number in range(4)
    ]
    return group(ticket.task, trajectories)


async def test_a_killed_run_that_resumes_ends_where_the_uninterrupted_one_ends(redis_url, tmp_path):
    """Same prompts, same parameters, bit for bit, on-policy and with the same trajectories."""
    policies, tasks = [], []
    for name, kill in (("whole", False), ("killed", True)):
        folder = tmp_path / name
        folder.mkdir()
        client = stream.connect(redis_url, timeout_s=5)
        await client.flushall()
        streams = stream.Streams(client, RUN_ID, claim_timeout_s=30)
        await streams.open()
        config = rig.run_file(folder, redis_url, steps=7, max_staleness=0, checkpoint={"every_steps": 3})
        with rig.trainer(config) as trainer:
            if kill:  # with step 3 durable, step 4 learned and the tickets of step 5 out
                gateway = Gateway(streams)
                for _ in range(8):
                    (ticket,) = await gateway.claim(1)
                    await gateway.publish(ticket, by_ticket(ticket, ticket.task.min_policy_version))
                await rig.eventually(streams.cursor, 10)
                await rig.eventually(streams.group_count, 2)
                trainer.process.kill()
                trainer.process.start()
                await trainer.until(lambda status: status.policy_version == 7)  # step 4 again, then what engines hold

            def newest(ticket, _version, trainer=trainer):
                return by_ticket(ticket, trainer.lines("versions.jsonl")[-1]["policy_version"])

            async with rig.serving(streams, newest if kill else by_ticket):
                assert await trainer.ended() == 0
            policies.append((trainer.run / "policy" / "model.safetensors").read_bytes())
            tasks.append([int(group["task_id"]) for group in trainer.consumed])
        await client.aclose()
    assert tasks[0] == tasks[1] == list(range(14))
    assert policies[0] == policies[1]


@pytest.mark.parametrize("kills", [2])
async def test_kills_at_any_time_lose_nothing(streams, redis_url, tmp_path, kills):
    with rig.trainer(rig.run_file(tmp_path, redis_url, steps=40, checkpoint={"every_steps": 7})) as trainer:
        async with rig.serving(streams):
            for number in range(1, kills + 1):
                await trainer.until(lambda status, number=number: status.step >= 11 * number)
                trainer.process.kill()
                trainer.process.start()
            assert await trainer.ended() == 0
    steps = trainer.lines("metrics.jsonl")
    assert [line["step"] for line in steps] == list(range(1, 41))
    versions = [line["policy_version"] for line in steps]
    assert sorted(set(versions)) == versions
    assert all(group["age_max"] <= 1 for group in trainer.consumed)
    await account(trainer, streams)


async def test_the_trainer_waits_for_a_redis_that_dies(tmp_path):
    (tmp_path / "redis").mkdir()
    port = processes.free_port()
    with processes.redis_server(tmp_path / "redis", port=port) as (url, server):
        client = stream.connect(url, timeout_s=5)
        streams = stream.Streams(client, RUN_ID, claim_timeout_s=30)
        await streams.open()
        with rig.trainer(rig.run_file(tmp_path, url, steps=4)) as trainer:
            await publish(Gateway(streams), 3)
            await trainer.until(lambda status: status.step == 1)
            server.kill()
            await trainer.until(lambda status: "Redis does not answer" in trainer.process.output)
            server.start()
            processes.wait_until(lambda: processes.listening(port), timeout_s=10)
            async with rig.serving(streams):
                assert await trainer.ended() == 0
        assert [int(group["task_id"]) for group in trainer.consumed] == list(range(8))
        await account(trainer, streams)
        await client.aclose()


async def test_a_redis_that_comes_back_without_its_memory_costs_no_step_and_no_version(tmp_path):
    folder, port = tmp_path / "redis", processes.free_port()
    folder.mkdir()
    with processes.redis_server(folder, port=port) as (url, server):
        client = stream.connect(url, timeout_s=5)
        streams = stream.Streams(client, RUN_ID, claim_timeout_s=30)
        await streams.open()

        async def delivered():
            """Groups that the trainer has read and not acknowledged."""
            return (await client.xpending(f"headrace:{{{RUN_ID}}}:groups", "trainer"))["pending"]

        def recovered():
            return "Redis has lost its memory" in trainer.process.output

        async def forget():
            server.kill()
            for path in [*folder.glob("appendonlydir/*"), *folder.glob("*.aof")]:
                path.unlink()
            server.start()
            processes.wait_until(lambda: processes.listening(port), timeout_s=10)
            await insist(streams.open)  # as a gateway does; the connection may be one that died

        config = rig.run_file(tmp_path, url, steps=8, checkpoint={"every_steps": 100})
        with rig.trainer(config) as trainer:
            await publish(Gateway(streams), 5)  # two steps that wait for a checkpoint, and half of a third
            await trainer.until(lambda status: status.step == 2)
            await rig.eventually(streams.cursor, 8)
            await rig.eventually(delivered, 5)
            await forget()
            await trainer.until(lambda status: status.outstanding_tickets == 4 and recovered())
            assert (await streams.ticket_count(), await streams.cursor()) == (3, 11)
            await publish(Gateway(streams), 1)
            await trainer.until(lambda status: status.step == 3)
            await rig.eventually(streams.ticket_count, 4)
            # Now the trainer dies with it: no checkpoint and no Redis know of the versions that engines hold.
            before = trainer.lines("versions.jsonl")
            trainer.process.kill()
            await forget()
            trainer.process.start()
            async with rig.serving(streams):
                assert await trainer.ended() == 0
        versions = [line["policy_version"] for line in trainer.lines("versions.jsonl")]
        assert versions[: len(before)] == [line["policy_version"] for line in before]
        assert sorted(set(versions)) == versions
        assert [line["step"] for line in trainer.lines("metrics.jsonl")] == list(range(1, 9))
        assert all(group["age_max"] <= 1 for group in trainer.consumed)
        await client.aclose()
