"""services.trainer.batcher: verdicts, and what becomes of the groups they fall on."""

import asyncio
import math

import numpy as np
import pytest

from headrace import config, stream
from headrace.stream import GroupEntry
from headrace.trajectory import RecordError
from headrace.v1 import trajectory_pb2 as pb
from services.trainer.batcher import Batcher
from services.trainer.credit import credited
from services.trainer.feeder import Feeder
from services.trainer.inbox import Inbox
from services.trainer.journal import Journal
from services.trainer.ledger import Ledger
from services.trainer.lineage import Lineage
from services.trainer.returns import DEGENERATE, LEFT_OVER, TOO_FEW_TRAINABLE, TOO_STALE, Returns
from services.trainer.status import Status
from services.trainer.stopwatch import Stopwatch
from services.trainer.task_order import TaskOrder, TaskSource
from services.trainer.verdict import Rules, Unfit, learnable, parse, to_sample
from tests.trainer.gateway import RUN_ID, VOCABULARY, Gateway, group, ordinary, trajectory

TASK = pb.Task(task_id="00000000", environment="a", split="train", purpose=pb.PURPOSE_TRAINING)
LINEAGE = Lineage({1: 1, 2: 2, 3: 3})


def rules(**changes):
    defaults = {
        "run_id": RUN_ID,
        "vocabulary_size": VOCABULARY,
        "environments": frozenset({"a"}),
        "max_row_tokens": 8,
        "max_staleness": 1,
        "truncated": "keep",
        "truncation_penalty": 0.5,
    }
    return Rules(**(defaults | changes))


def verdict(record, **changes):
    entry = GroupEntry("1-1", record.SerializeToString())
    judged = rules(**changes)
    return learnable(entry, parse(entry, judged, LINEAGE, cursor=1), judged, LINEAGE)


def test_a_group_becomes_samples_with_advantages():
    mixed = [trajectory("x", reward=0, versions=(2, 3)), trajectory("y", reward=1, versions=(3, 3))]
    result = verdict(group(TASK, mixed))
    x, y = result.samples
    np.testing.assert_array_equal(x.token_ids, [3, 4, 5, 2])
    np.testing.assert_array_equal(x.action_mask, [False, False, True, True])
    np.testing.assert_array_equal(x.behaviour_logprobs, [0, 0, -1, -1])
    np.testing.assert_array_equal(x.versions, [-1, -1, 2, 3])
    np.testing.assert_array_equal(x.ages, [0, 0, 1, 0])
    np.testing.assert_array_equal(y.rewards, [0, 0, 0, 1])
    credit = credited([result.comparison], config.Advantage())
    assert [sample.advantage for sample in credit] == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5)
    assert (result.tokens_by_age, result.oldest_version, result.newest_version) == ({0: 3, 1: 1}, 2, 3)
    assert result.rewards == (0, 1)
    assert result.action_tokens == 4
    assert not result.degenerate


def test_equal_rewards_are_no_signal_but_count():
    result = verdict(ordinary(TASK, version=3, rewards=[0.1] * 3))
    assert result.degenerate
    assert [sample.advantage for sample in credited([result.comparison], config.Advantage())] == [0, 0, 0]


def test_an_observation_after_the_last_action_is_left_out():
    record = trajectory("x", reward=1)
    record.turns.append(pb.Turn(observation_token_ids=np.array([7, 7], "<i4").tobytes()))
    np.testing.assert_array_equal(to_sample(record).token_ids, [3, 4, 5, 2])


def test_a_failed_episode_is_no_reward():
    failed = trajectory("z", reward=None, status=pb.EPISODE_STATUS_ENVIRONMENT_ERROR)
    result = verdict(group(TASK, [*ordinary(TASK, version=3).trajectories, failed]))
    assert result.rewards == (0, 1)
    with pytest.raises(Unfit) as unfit:
        verdict(group(TASK, [trajectory("x", reward=1.0), failed]))
    assert unfit.value.reason == TOO_FEW_TRAINABLE
    assert "ENVIRONMENT_ERROR" in str(unfit.value)


@pytest.mark.parametrize(
    ("truncated", "ids", "rising"),
    [("keep", ["x", "y", "z"], True), ("mask", ["x", "y"], True), ("penalise", ["x", "y", "z"], False)],
)
def test_truncated_trajectories_as_configured(truncated, ids, rising):
    cut = trajectory("z", reward=1.25, versions=(3, 3), status=pb.EPISODE_STATUS_TRUNCATED_TOKENS)
    whole = [trajectory(n, reward=reward, versions=(3, 3)) for n, reward in (("x", 0), ("y", 1))]
    result = verdict(group(TASK, [*whole, cut]), truncated=truncated)
    assert [sample.trajectory_id for sample in result.samples] == ids
    assert result.rewards == (0, 1, 1.25)
    assert result.truncated == 1
    if "z" in ids:
        _, whole_one, cut_one = credited([result.comparison], config.Advantage())
        assert (cut_one.advantage > whole_one.advantage) == rising


def test_a_group_of_which_nothing_is_left_in_the_loss_is_returned():
    cut = [trajectory(n, reward=1, versions=(3, 3), status=pb.EPISODE_STATUS_TRUNCATED_TIME) for n in "xy"]
    assert verdict(group(TASK, cut)).truncated == 2
    with pytest.raises(Unfit):
        verdict(group(TASK, cut), truncated="mask")


def test_staleness_is_that_of_the_oldest_token():
    mixed = group(TASK, [trajectory("x", reward=0, versions=(1, 3)), trajectory("y", reward=1, versions=(3, 3))])
    with pytest.raises(Unfit) as unfit:
        verdict(mixed)
    assert unfit.value.reason == TOO_STALE
    assert verdict(mixed, max_staleness=2).age_max == 2


def test_only_the_tokens_that_are_too_old_leave_the_loss_where_config_says_so():
    mixed = group(
        TASK,
        [
            trajectory("x", reward=0, versions=(1, 3)),
            trajectory("y", reward=1, versions=(3, 3)),
            trajectory("z", reward=2, versions=(1, 1)),
        ],
    )
    result = verdict(mixed, stale="mask")
    assert [sample.trajectory_id for sample in result.samples] == ["x", "y"]
    np.testing.assert_array_equal(result.samples[0].action_mask, [False, False, False, True])
    assert (result.stale_tokens, result.action_tokens, result.age_max, result.oldest_version) == (3, 3, 0, 3)
    # What has left the loss is compared all the same: the mean reward is 1.
    x, y = credited([result.comparison], config.Advantage(estimator="dr_grpo"))
    assert (x.advantage, y.advantage) == (-1, 0)
    with pytest.raises(Unfit) as unfit:
        verdict(group(TASK, [trajectory(n, reward=1, versions=(1, 1)) for n in "xy"]), stale="mask")
    assert unfit.value.reason == TOO_STALE


def test_a_long_episode_s_reward_falls():
    long = trajectory("y", reward=1, observation=[3] * 5, versions=(3, 3))
    pair = group(TASK, [trajectory("x", reward=1, versions=(3, 3)), long])
    result = verdict(pair, overlong_limit=8, overlong_buffer=4, overlong_penalty=1.0)
    assert [float(sample.rewards.sum()) for sample in result.samples] == [1, 0.25]  # 7 tokens: 3 of 4
    assert result.rewards == (1, 1)
    assert not result.degenerate


def test_rewards_of_turns_keep_their_places():
    whole = trajectory("x", reward=1, versions=(3, 3))
    second = whole.turns.add()
    second.CopyFrom(whole.turns[0])
    second.reward = 2
    whole.turns.add(observation_token_ids=whole.turns[0].observation_token_ids, reward=4)
    sample = to_sample(whole)
    np.testing.assert_array_equal(sample.rewards, [0, 0, 0, 1, 0, 0, 0, 6])
    np.testing.assert_array_equal(np.flatnonzero(sample.turn_ends), [3, 7])


def test_on_policy_takes_only_the_newest_version():
    assert verdict(ordinary(TASK, version=3), max_staleness=0).age_max == 0
    with pytest.raises(Unfit):
        verdict(ordinary(TASK, version=2), max_staleness=0)


def test_what_a_warm_start_left_over_is_returned():
    evaluated = pb.Task(task_id="00000000", environment="a", split="train", purpose=pb.PURPOSE_EVALUATION)
    with pytest.raises(Unfit) as unfit:
        verdict(ordinary(evaluated, version=1))
    assert unfit.value.reason == LEFT_OVER


def malformed():
    good = ordinary(TASK, version=3)
    yield "another run", group(TASK, good.trajectories, run_id="other"), "run_id"
    yield "NaN reward", ordinary(TASK, version=3, rewards=[0, math.nan]), r"turns\[0\].reward is nan"
    yield "infinite reward", ordinary(TASK, version=3, rewards=[0, math.inf]), "reward is inf"
    yield "no reward", group(TASK, [trajectory("x", reward=None), trajectory("y", reward=1)]), "no reward"
    yield "future version", ordinary(TASK, version=4), "has not been published"
    yield "token outside", group(TASK, [trajectory("x", reward=1, action=(5, VOCABULARY))]), "outside"
    yield "too long", group(TASK, [trajectory("x", reward=1, observation=[3] * 7)]), "max_row_tokens"
    yield "no prompt", group(TASK, [trajectory("x", reward=1, observation=[])]), "before it has observed"
    yield "spans too short", group(TASK, [trajectory("x", reward=1, versions=[3])]), "version_spans covers 1 of 2"
    for field, value in (("environment", "zzz"), ("task_id", "00000001"), ("task_id", "x"), ("split", "")):
        task = pb.Task()
        task.CopyFrom(TASK)
        setattr(task, field, value)
        yield f"{field} {value!r}", ordinary(task, version=3), f"task.{field}"


@pytest.mark.parametrize(("record", "reason"), [pytest.param(*case[1:], id=case[0]) for case in malformed()])
def test_what_cannot_be_true_is_refused_with_the_reason(record, reason):
    with pytest.raises(RecordError, match=reason):
        verdict(record)


def test_noise_is_refused():
    with pytest.raises(RecordError, match="no TrajectoryGroup"):
        parse(GroupEntry("1-1", b"\xff\xff\xff"), rules(), LINEAGE, cursor=1)


@pytest.fixture
async def bench(streams, tmp_path, request):
    """A batcher and all that it needs, with four tickets out and a gateway that holds them."""
    status, lineage = Status(RUN_ID, 1), Lineage({1: 1})
    order = TaskOrder({"a": TaskSource(split="train", weight=1.0, task_count=None)}, seed=0)
    ledger = Ledger(Journal(tmp_path / "consumed.jsonl"))
    feeder = Feeder(streams, order, ledger, lineage, status, groups_per_step=4, max_staleness=0)
    await feeder.open(at_least=0)
    await feeder.top_up()
    gateway = Gateway(streams)
    await gateway.claim(4)
    returns = Returns(Journal(tmp_path / "returned.jsonl"), status, environments={"a"})
    return (
        Batcher(Inbox(streams), feeder, lineage, returns, rules(**getattr(request, "param", {}))),
        gateway,
        lineage,
        status,
    )


async def take(batcher, count):
    return [group async for arrived in batcher.groups(count, Stopwatch()) for group in arrived]


async def test_groups_come_oldest_first(bench, streams):
    batcher, gateway, _, _ = bench
    for ticket in reversed(gateway.claimed):
        await gateway.publish(ticket, ordinary(ticket.task, version=1))
    assert [group.task.task_id for group in await take(batcher, 3)] == ["00000003", "00000002", "00000001"]
    assert [group.task.task_id for group in await take(batcher, 1)] == ["00000000"]
    assert await streams.ticket_count() == 0  # consumed is not replaced before the step ends


async def test_returned_tickets_are_replaced_at_once_and_counted(bench, streams, tmp_path):
    batcher, gateway, lineage, status = bench
    bad, failed, stale, good = gateway.claimed
    lineage.publish(2)
    lineage.publish(3)
    await gateway.publish(bad, ordinary(bad.task, version=3, rewards=[0, math.nan]))
    await gateway.publish(failed, group(failed.task, [trajectory("x", reward=1, versions=(3, 3))]))
    await gateway.publish(stale, ordinary(stale.task, version=1))
    await gateway.publish(good, ordinary(good.task, version=3))
    (taken,) = await take(batcher, 1)
    assert taken.task.task_id == "00000003"
    replacements = await gateway.claim(3)
    assert [ticket.task.task_id for ticket in replacements] == ["00000004", "00000005", "00000006"]
    assert {ticket.task.min_policy_version for ticket in replacements} == {3}
    assert status.returned_groups == {("a", "malformed"): 1, ("a", TOO_FEW_TRAINABLE): 1, ("a", TOO_STALE): 1}
    again = Status(RUN_ID, 1)
    Returns(Journal(tmp_path / "returned.jsonl"), again, environments={"a"})  # as a restarted trainer counts
    assert again.returned_groups == status.returned_groups
    ((_, reason),) = await streams.dead_letters()
    assert "reward is nan" in reason
    assert await streams.group_ids() == [taken.entry_id]


@pytest.mark.parametrize("bench", [{"degenerate_returns": 2}], indirect=True)
async def test_degenerate_groups_are_given_back_for_others_up_to_a_bound(bench):
    batcher, gateway, _, status = bench
    for ticket in gateway.claimed:
        await gateway.publish(ticket, ordinary(ticket.task, version=1, rewards=[1, 1]))
    taken = await take(batcher, 2)
    assert [group.task.task_id for group in taken] == ["00000002", "00000003"]  # past the bound they are trained on
    assert status.returned_groups == {("a", DEGENERATE): 2}
    assert [ticket.task.task_id for ticket in await gateway.claim(2)] == ["00000004", "00000005"]
    batcher.begin_step()
    for ticket in gateway.claimed[4:]:
        await gateway.publish(ticket, ordinary(ticket.task, version=1, rewards=[1, 1]))
    assert await anext(batcher.groups(2, Stopwatch())) == []
    assert status.returned_groups == {("a", DEGENERATE): 4}


async def test_a_pause_after_failures_is_time_spent_waiting(bench, streams, redis_url):
    batcher, _, _, _ = bench
    client = stream.connect(redis_url, timeout_s=5)
    for _ in range(64):
        await client.xadd(f"headrace:{{{RUN_ID}}}:groups", {"record": b"noise"})
    await client.aclose()
    watch = Stopwatch()
    assert await anext(batcher.groups(64, watch)) == []
    assert len(await streams.dead_letters()) == 64
    assert watch.spent_s("waiting") > 0.2


async def test_time_in_the_queue_counts_as_staleness(bench, streams):
    batcher, gateway, lineage, status = bench
    for ticket in gateway.claimed:
        await gateway.publish(ticket, ordinary(ticket.task, version=1))
    assert (await take(batcher, 1))[0].age_max == 0
    lineage.publish(2)
    assert (await take(batcher, 1))[0].age_max == 1
    lineage.publish(3)

    async def replace():
        for ticket in await gateway.claim(2):
            await gateway.publish(ticket, ordinary(ticket.task, version=3))

    _, (fresh,) = await asyncio.gather(replace(), take(batcher, 1))
    assert fresh.age_max == 0
    assert status.returned_groups == {("a", TOO_STALE): 2}


async def test_a_new_process_is_given_unacknowledged_groups_again(bench, streams):
    batcher, gateway, _, _ = bench
    for ticket in gateway.claimed:
        await gateway.publish(ticket, ordinary(ticket.task, version=1))
    first = await take(batcher, 2)
    inbox = Inbox(streams)
    again = [entry.entry_id for _ in range(2) for entry in await inbox.read(9, 0)]
    assert again[:2] == [group.entry_id for group in first]
    assert len(set(again)) == 4
