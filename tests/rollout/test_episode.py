"""The loop, with a real tokenizer, over real HTTP and gRPC: tokens are exact, statuses are honest."""

import asyncio
import functools
import os

import numpy as np
import pytest

from headrace import trajectory as records
from headrace.v1 import trajectory_pb2 as pb
from headrace.v1.trajectory_pb2 import Message
from services.rollout.episode import Sampling, group_size, run_group, sampling_of
from tests.engine_script import Script
from tests.rollout import rig
from tests.rollout.episodes import ids, outcome, start_episodes
from tests.rollout.rig import END, VOCABULARY_SIZE, task
from tests.rollout.scripted_environment import ScriptedEnvironment, says, turns

PROMPT = [4, 7, 8, 9, 5]  # <user> guess a number <assistant>
HIGHER = [4, 10, 5]  # <user> higher <assistant>


@pytest.fixture
def episodes(tmp_path):
    return functools.partial(start_episodes, tmp_path)


async def test_the_ids_that_are_trained_are_the_ids_that_the_engine_saw(episodes):
    replies = [[14, END], [15, END], [16, 17], [18, END], [19, END]]
    async with episodes(turns(5), Script(tokens=replies), environments__guess_number__max_turns=5) as run:
        trajectory = await run.run()
    assert outcome(trajectory) == "COMPLETED" and trajectory.terminated and not trajectory.truncated
    assert [ids(turn.action_token_ids) for turn in trajectory.turns] == replies
    # The third action reached its length limit, so the observation after it closes the turn.
    assert [ids(turn.observation_token_ids) for turn in trajectory.turns] == [
        PROMPT,
        HIGHER,
        HIGHER,
        [END, *HIGHER],
        HIGHER,
    ]
    context = records.context_token_ids(trajectory.turns).tolist()
    last = run.engine.requests[-1]
    assert context == last["input_ids"] + replies[-1]
    for turn, request in zip(trajectory.turns, run.engine.requests, strict=True):
        length = len(request["input_ids"])
        assert context[:length] == request["input_ids"]
        assert context[length : length + 2] == ids(turn.action_token_ids)
    assert [turn.finish_reason for turn in trajectory.turns] == [pb.FINISH_REASON_STOP] * 2 + [
        pb.FINISH_REASON_LENGTH
    ] + [pb.FINISH_REASON_STOP] * 2
    assert [action.message.content for action in run.environment.actions[0]] == ["1", "2", "3 4", "5", "6"]
    assert [(message.role, message.content) for message in trajectory.messages][-2:] == [
        ("assistant", "6"),
        ("user", "found"),
    ]
    assert [turn.HasField("reward") for turn in trajectory.turns] == [False] * 4 + [True]
    assert records.total_reward(trajectory) == 1.0 and trajectory.attempts == 1


CALL = '{"name": "add", "arguments": {}}'
CHARACTERS = {
    "model__create__characters": True,
    "model__create__words": [
        *"abdefghimnorsu127{}",
        "12",
        "<tool_call>",
        "</tool_call>",
        '{"name": "add", "arguments": {}}',
    ],
}


async def test_a_split_that_the_tokenizer_would_not_make_is_kept(episodes):
    replies = []
    async with episodes(turns(2), Script(tokens=[[END]]), **CHARACTERS) as run:
        one, two, both = (run.action(text)[0] for text in ("1", "2", "12"))
        assert run.action("12").tolist() == [both, END]
        replies = [[int(one), int(two)], [int(both), END]]
        run.engine.set_script(Script(tokens=replies))
        trajectory = await run.run()
        assert [action.message.content for action in run.environment.actions[0]] == ["12", "12"]
    assert [ids(turn.action_token_ids) for turn in trajectory.turns] == replies
    assert records.context_token_ids(trajectory.turns).tolist() == run.engine.requests[-1]["input_ids"] + replies[1]


async def test_every_token_carries_the_version_that_sampled_it(episodes):
    """The engine's tokens name their version; versions change in the middle of actions and between turns."""
    script = Script(tokens="version", delay_per_token_s=0.03)
    async with episodes(
        turns(4), script, policy_version=8, rollout__max_action_tokens=5, environments__guess_number__max_turns=9
    ) as run:
        running = [asyncio.create_task(run.run()) for _ in range(8)]
        for version in range(9, VOCABULARY_SIZE - 1):
            await asyncio.sleep(0.05)
            await run.engine.set_policy_version(version)
        trajectories = [await episode for episode in running]
    for trajectory in trajectories:
        for turn in trajectory.turns:
            assert records.versions(turn).tolist() == ids(turn.action_token_ids)
        assert max(len(turn.version_spans) for turn in trajectory.turns) > 1
    keys = {(request["rid"].rsplit("-", 1)[0], request.get("extra_key")) for request in run.engine.requests}
    assert {key for _, key in keys} == {None, "8"}


async def test_no_token_is_older_than_the_ticket_asks(episodes):
    async with episodes(turns(1), Script(tokens="version"), policy_version=8) as run:
        running = asyncio.create_task(run.run(task(min_policy_version=10)))
        await asyncio.sleep(0.2)
        assert not running.done()
        await run.engine.set_policy_version(10)
        trajectory = await running
    assert records.versions(trajectory.turns[0]).tolist() == [10, 10]


async def test_rewards_of_every_turn_count_and_zero_is_one(episodes):
    async def play(_task, _session):
        yield says("guess a number")
        yield says("higher", 0.5)
        yield says("higher")
        yield says("found", 0.0, terminated=True, metrics={"turns": 3})

    async with episodes(play, Script(tokens="random")) as run:
        trajectory = await run.run()
    assert [turn.reward if turn.HasField("reward") else None for turn in trajectory.turns] == [0.5, None, 0.0]
    assert dict(trajectory.metrics) == {"turns": 3}


async def test_the_turn_limit(episodes):
    async with episodes(turns(9), Script(tokens="random"), environments__guess_number__max_turns=3) as run:
        trajectory = await run.run()
    assert outcome(trajectory) == "TRUNCATED_TURNS" and trajectory.truncated and len(trajectory.turns) == 3
    assert records.total_reward(trajectory) is None and not records.is_trainable(trajectory)


async def test_the_environments_own_limit(episodes):
    async def play(_task, _session):
        yield says("guess a number")
        yield says("higher", 0.25, truncated=True)

    async with episodes(play, Script(tokens="random")) as run:
        trajectory = await run.run()
    assert outcome(trajectory) == "TRUNCATED_TURNS" and records.is_trainable(trajectory)
    assert records.total_reward(trajectory) == 0.25


async def test_the_token_limit_is_never_exceeded(episodes):
    async def play(_task, _session):
        yield says("guess a number")
        while True:
            yield says("higher", 0.0)

    limit = {"rollout__max_episode_tokens": 24, "rollout__max_action_tokens": 4}
    async with episodes(play, Script(tokens=[[14] * 4]), environments__guess_number__max_turns=99, **limit) as run:
        trajectory = await run.run()
    # 5 + 4, then 4 + 4 a turn: after the second turn 7 tokens are left, of which the observation takes 4.
    assert [request["sampling_params"]["max_new_tokens"] for request in run.engine.requests] == [4, 4, 3]
    assert len(records.context_token_ids(trajectory.turns)) == 24
    assert outcome(trajectory) == "TRUNCATED_TOKENS" and records.is_trainable(trajectory)


async def test_a_prompt_beyond_the_limit_asks_no_engine(episodes):
    async def play(_task, _session):
        yield says("guess " * 100)

    async with episodes(play) as run:
        trajectory = await run.run()
    assert outcome(trajectory) == "TRUNCATED_TOKENS" and not trajectory.turns and not run.engine.requests


async def test_the_time_limit_keeps_what_was_given_before(episodes):
    async def play(_task, _session):
        yield says("guess a number")
        yield says("higher", 0.5)
        await asyncio.sleep(60)
        yield says("higher")

    async with episodes(play, Script(tokens="random"), rollout__episode_timeout_s=0.5) as run:
        trajectory = await run.run()
        assert outcome(trajectory) == "TRUNCATED_TIME"
        assert records.total_reward(trajectory) == 0.5 and records.is_trainable(trajectory)
        assert trajectory.timings.environment_s > 0.3 and 0.4 < trajectory.timings.total_s < 2
        await rig.eventually(lambda: run.environment.open == 0)


async def test_the_time_limit_before_any_reward_is_no_reward(episodes):
    async with episodes(turns(1), Script(delay_s=60), rollout__episode_timeout_s=0.5) as run:
        trajectory = await run.run()
        assert outcome(trajectory) == "TRUNCATED_TIME" and not trajectory.turns
        assert not records.is_trainable(trajectory) and records.total_reward(trajectory) is None
        await rig.eventually(lambda: not run.engine._running)


async def test_a_malformed_tool_call_goes_to_the_environment(episodes):
    texts = ["hm<tool_call>{</tool_call>", f"<tool_call>{CALL}</tool_call>"]
    limits = {"rollout__tool_parser": "hermes", "rollout__max_action_tokens": 8}
    async with episodes(turns(2), **CHARACTERS, **limits) as run:
        replies = [run.action(text).tolist() for text in texts]
        run.engine.set_script(Script(tokens=replies))
        trajectory = await run.run()
    assert outcome(trajectory) == "COMPLETED" and len(trajectory.turns) == 2
    first, second = run.environment.actions[0]
    assert first.message.content == "hm" and not first.message.tool_calls and len(first.malformed_tool_calls) == 1
    assert second.message.tool_calls[0].name == "add" and not second.malformed_tool_calls
    assert [message for message in trajectory.messages if message.role == "assistant"] == [
        first.message,
        second.message,
    ]
    assert [ids(turn.action_token_ids) for turn in trajectory.turns] == replies


async def test_an_expert_acts_in_a_demonstration(episodes):
    async def play(_task, _session):
        yield says("guess a number", demonstration=Message(role="assistant", content="4"))
        yield says("higher", demonstration=Message(role="assistant", content="6"))
        yield says("found", 1.0, terminated=True)

    demonstration = task(purpose=pb.PURPOSE_DEMONSTRATION)
    async with episodes(play) as run:
        trajectory = await run.run(demonstration)
        assert group_size(demonstration, run.world.settings) == 1
    assert not run.engine.requests and outcome(trajectory) == "COMPLETED"
    assert [ids(turn.action_token_ids) for turn in trajectory.turns] == [[17, END], [19, END]]
    assert [ids(turn.observation_token_ids) for turn in trajectory.turns] == [PROMPT, HIGHER]
    assert not any(turn.action_logprobs or turn.version_spans for turn in trajectory.turns)
    assert [action.message.content for action in run.environment.actions[0]] == ["4", "6"]


async def test_a_demonstration_needs_no_engine(tmp_path):
    async def play(_task, _session):
        yield says("guess a number", demonstration=Message(role="assistant", content="4"))
        yield says("found", 1.0, terminated=True)

    environment = await ScriptedEnvironment.start(play)
    async with rig.world(tmp_path, engines=["127.0.0.1:1"], environment=environment.address) as world:
        demonstration = task(purpose=pb.PURPOSE_DEMONSTRATION)
        trajectories = await asyncio.wait_for(run_group(demonstration, world=world, queued_s=0), 5)
    await environment.stop()
    assert [outcome(trajectory) for trajectory in trajectories] == ["COMPLETED"]


async def test_evaluation_has_its_own_temperature(episodes):
    async with episodes(
        turns(1), Script(tokens="random"), rollout__temperature=0.5, rollout__evaluation_temperature=0.25
    ) as run:
        for purpose in (pb.PURPOSE_TRAINING, pb.PURPOSE_EVALUATION):
            await run_group(task(purpose=purpose), world=run.world, queued_s=0)
        assert sampling_of(task(), run.world.settings) == Sampling(0.5, 2)
    sent = [request["sampling_params"]["temperature"] for request in run.engine.requests]
    assert sent == [0.5, 0.5, 0.25, 0.25]


async def test_a_groups_stragglers_are_cut_off(episodes):
    async def play(_task, session):
        yield says("guess a number")
        if session == 1:
            await asyncio.sleep(60)
        yield says("found", 1.0, terminated=True)

    ended = []
    async with episodes(play, Script(tokens="random"), rollout__group_timeout_s=0.5, rollout__group_size=4) as run:
        trajectories = await run_group(task(), world=run.world, queued_s=0, on_end=lambda: ended.append(1))
        await rig.eventually(lambda: run.environment.open == 0)
    assert sorted(outcome(trajectory) for trajectory in trajectories) == ["CANCELLED"] + ["COMPLETED"] * 3
    assert len(ended) == 4 and len({trajectory.trajectory_id for trajectory in trajectories}) == 4


async def test_a_group_waits_for_the_first_engine_without_using_up_its_time(episodes):
    async with episodes(turns(1), Script(tokens="version"), policy_version=None, rollout__episode_timeout_s=0.3) as run:
        running = asyncio.create_task(run_group(task(), world=run.world, queued_s=asyncio.get_running_loop().time()))
        await asyncio.sleep(0.6)
        assert not running.done() and not run.environment.tasks
        await run.engine.set_policy_version(7)
        trajectories = await asyncio.wait_for(running, 5)
    assert {outcome(trajectory) for trajectory in trajectories} == {"COMPLETED"}
    assert all(trajectory.timings.queue_s > 0.5 for trajectory in trajectories)


async def test_a_long_observation_leaves_the_event_loop_to_others(episodes):
    async def play(_task, _session):
        yield says("guess a number " * 100_000)

    async with episodes(play) as run:
        lag_s, running = 0.0, asyncio.create_task(run.run())
        loop = asyncio.get_running_loop()
        while not running.done():
            start_s, waited_s = loop.time(), rig.waited_s(os.getpid())
            await asyncio.sleep(0.005)
            lag_s = max(lag_s, loop.time() - start_s - (rig.waited_s(os.getpid()) - waited_s))
        assert outcome(running.result()) == "TRUNCATED_TOKENS"
    assert lag_s < 0.2


async def test_arrays_have_the_records_types(episodes):
    async with episodes(turns(1), Script(tokens=[[14, END]], logprob=-0.25)) as run:
        (turn,) = (await run.run()).turns
    assert records.logprobs(turn.action_logprobs).tolist() == [-0.25, -0.25]
    assert records.logprobs(turn.action_logprobs).dtype == np.float32
    assert [(span.policy_version, span.length) for span in turn.version_spans] == [(3, 2)]
