"""The trainer as a process: it steps, publishes, commits and ends. The test is its gateway."""

import asyncio
import math
import urllib.request

import pytest

from headrace import rpc, stream, weights
from headrace.v1 import trainer_service_pb2 as pb
from headrace.v1 import trainer_service_pb2_grpc
from services.trainer.model import huggingface
from tests import processes
from tests.trainer import rig
from tests.trainer.gateway import RUN_ID, ordinary
from tests.trainer.test_server import pull

pytestmark = pytest.mark.timeout(400)  # a busy machine may take a minute to import and compile


async def test_a_run_goes_to_its_last_step(streams, redis_url, tmp_path):
    with rig.trainer(rig.run_file(tmp_path, redis_url, steps=5)) as trainer:
        async with rig.serving(streams):
            assert await trainer.ended() == 0
    assert [line["step"] for line in trainer.lines("metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert [line["policy_version"] for line in trainer.lines("metrics.jsonl")] == [2, 3, 4, 5, 6]
    last = trainer.lines("metrics.jsonl")[-1]
    assert (last["reward_mean"], last["trajectories"], last["action_tokens"]) == (0.5, 4, 8)
    assert 0 <= last["idle_fraction"] <= 1
    assert last["staleness_max"] <= 1
    assert sum(last.get(f"staleness_share/{age}", 0) for age in range(2)) == pytest.approx(1)
    assert last["trained_tokens"] > last["action_tokens"]
    assert last["gradient_norm_spike"] > 0
    parts = sum(last[f"{part}_s"] for part in ("waiting", "packing", "compute", "publishing", "committing"))
    assert parts <= last["step_s"]
    assert [int(group["task_id"]) for group in trainer.consumed] == list(range(10))
    assert await streams.group_ids() == []
    assert huggingface.has_weights(trainer.run / "policy")
    assert (trainer.run / "policy" / "tokenizer.json").exists()


async def test_outstanding_tickets_are_bounded_by_staleness(streams, redis_url, tmp_path):
    with rig.trainer(rig.run_file(tmp_path, redis_url)) as trainer:
        await trainer.until(lambda status: status.outstanding_tickets == 4)
        gateway = rig.Gateway(streams)
        tickets = await gateway.claim(4)
        for ticket in tickets[:2]:
            await gateway.publish(ticket, ordinary(ticket.task, version=1))
        await trainer.until(lambda status: status.step == 1)
        replacements = await gateway.claim(2)
        assert {ticket.task.min_policy_version for ticket in replacements} == {2}
        assert await streams.ticket_count() == 4


async def test_a_run_whose_numbers_are_no_numbers_ends_and_says_why(streams, redis_url, tmp_path):
    changes = {"steps": 50, "optimizer": {"learning_rate": 1e30}, "max_skipped_updates": 3}
    with rig.trainer(rig.run_file(tmp_path, redis_url, **changes)) as trainer:
        async with rig.serving(streams):
            assert await trainer.ended() == 2
    (error,) = [line for line in trainer.process.output.splitlines() if line.startswith("error:")]
    assert "the last 3 updates were skipped" in error
    assert len(trainer.lines("metrics.jsonl")) < 10


async def test_on_policy_trains_on_the_newest_version_only(streams, redis_url, tmp_path):
    with rig.trainer(rig.run_file(tmp_path, redis_url, max_staleness=0)) as trainer:
        async with rig.serving(streams):
            assert await trainer.ended() == 0
    for line in trainer.lines("consumed.jsonl"):
        for group in line["groups"]:
            assert group["oldest_version"] == group["newest_version"] == line["policy_version"]
            assert group["age_max"] == 0


async def test_bad_groups_cost_a_ticket_each_and_are_told(streams, redis_url, tmp_path):
    def answer(ticket, version):
        rewards = {0: [0, math.nan], 1: [1]}.get(int(ticket.task.task_id), [0, 1])
        return ordinary(ticket.task, version=version, rewards=rewards)

    with rig.trainer(rig.run_file(tmp_path, redis_url)) as trainer:
        async with rig.serving(streams, answer):
            assert await trainer.ended() == 0
    assert [int(group["task_id"]) for group in trainer.consumed] == list(range(2, 8))
    last = trainer.lines("metrics.jsonl")[-1]
    assert (last["returned_groups/malformed"], last["returned_groups/too_few_trainable"]) == (1, 1)
    assert len(await streams.dead_letters()) == 1


async def test_minibatches_are_updates_of_their_own(streams, redis_url, tmp_path):
    changes = {
        "groups_per_step": 4,
        "minibatches": 2,
        "loss": {"anchor": "start", "correction": "token_tis", "kl_coefficient": 0.1},
    }
    with rig.trainer(rig.run_file(tmp_path, redis_url, **changes)) as trainer:
        async with rig.serving(streams):
            assert await trainer.ended() == 0
    assert [len(line["groups"]) for line in trainer.lines("consumed.jsonl")] == [4, 4, 4]
    assert trainer.lines("metrics.jsonl")[-1]["skipped_updates"] == 0


async def test_a_reached_reward_ends_the_run(streams, redis_url, tmp_path):
    config = rig.run_file(tmp_path, redis_url, steps=50, stop_at_reward=0.5, stop_window=3)
    with rig.trainer(config) as trainer:
        async with rig.serving(streams):
            assert await trainer.ended() == 0
    assert len(trainer.lines("metrics.jsonl")) == 3
    assert huggingface.has_weights(trainer.run / "policy")


async def test_health_follows_the_first_version_which_pulls_whole(streams, redis_url, tmp_path):
    with rig.trainer(rig.run_file(tmp_path, redis_url)) as trainer:
        async with rpc.channel(trainer.address) as channel:
            stub = trainer_service_pb2_grpc.TrainerServiceStub(channel)
            watch = stub.WatchWeights(pb.WatchWeightsRequest(engine="e"), wait_for_ready=True)
            news = await watch.read()
            assert news.policy_version == 1
            processes.wait_until(lambda: processes.serving(trainer.address), timeout_s=5)
            request = pb.GetWeightsRequest(run_id=RUN_ID, policy_version=1)
            manifest, data = await pull(stub.GetWeights(request))
            assert weights.root_hash(manifest.tensors) == news.root_hash
            assert [weights.tensor_hash(memoryview(bytes(d))) for d in data] == [t.hash for t in manifest.tensors]
            watch.cancel()


async def test_a_signal_ends_it_with_a_checkpoint(streams, redis_url, tmp_path):
    config = rig.run_file(tmp_path, redis_url, steps=1000, checkpoint={"every_steps": 1000})
    with rig.trainer(config) as trainer:
        async with rig.serving(streams):
            await trainer.until(lambda status: status.step >= 3)
        trainer.process.terminate()
        assert await trainer.ended() == 0
        steps = len(trainer.lines("metrics.jsonl"))
        assert (trainer.run / "checkpoints" / str(steps)).is_dir()
        trainer.process.start()
        async with rig.serving(streams):
            await trainer.until(lambda status: status.step > steps)
    assert [line["step"] for line in trainer.lines("metrics.jsonl")][: steps + 1] == list(range(1, steps + 2))


def fetch(url):
    with urllib.request.urlopen(url, timeout=5) as reply:
        return reply.read().decode()


async def test_prometheus_tells_what_the_trainer_does(streams, redis_url, tmp_path):
    with rig.trainer(rig.run_file(tmp_path, redis_url)) as trainer:
        await trainer.until(lambda status: status.outstanding_tickets == 4)
        text = await asyncio.to_thread(fetch, f"http://{trainer.metrics_address}/metrics")
    assert "headrace_trainer_outstanding_tickets 4.0" in text
    assert "headrace_trainer_policy_version 1.0" in text


async def test_a_wrong_redis_password_is_named(tmp_path):
    (tmp_path / "redis").mkdir()
    with processes.redis_server(tmp_path / "redis") as (url, _):
        client = stream.connect(url, timeout_s=5)
        await client.config_set("requirepass", "right")
        await client.aclose()
        with rig.trainer(rig.run_file(tmp_path, url.replace("//", "//:wrong@"))) as trainer:
            assert await trainer.ended() == 2
            (error,) = [line for line in trainer.process.output.splitlines() if line.startswith("error:")]
    assert "refuses us" in error
    assert "wrong@" not in error


@pytest.mark.parametrize("defect", ["redis", "url", "port", "run_id", "folder", "config"])
async def test_what_a_user_got_wrong_ends_it_with_one_line(defect, redis_url, tmp_path):
    config = rig.run_file(tmp_path, redis_url)
    text = config.read_text()
    expected = {
        "redis": "no Redis answered",
        "url": "redis.url",
        "port": "cannot be bound",
        "run_id": "run.id: missing",
        "folder": "config.json",
        "config": "trainer.steps",
    }[defect]
    if defect == "redis":
        text = text.replace(redis_url, "redis://127.0.0.1:1/0").replace("timeout_s: 5", "timeout_s: 0.5")
    elif defect == "url":
        text = text.replace(redis_url, "somewhere")
    elif defect == "run_id":
        text = text.replace(f"id: {RUN_ID}", "id: ''")
    elif defect == "folder":
        (tmp_path / "broken").mkdir()
        start = text.index("model:")
        text = text[:start] + f"model: {{path: {tmp_path / 'broken'}}}\n" + text[text.index("redis:") :]
    elif defect == "config":
        text = text.replace("steps: 3", "steps: many")
    config.write_text(text)
    with rig.trainer(config) as trainer:
        if defect == "port":
            trainer.process.kill()
            rival = await rpc.Server.start(trainer.address, [])
            trainer.process.start()
        assert await trainer.ended() == 2
        errors = [line for line in trainer.process.output.splitlines() if line.startswith("error:")]
        assert len(errors) == 1
        assert expected in errors[0]
        assert "Traceback" not in trainer.process.output
        if defect == "port":
            await rival.stop(0)
