"""What failed has a name, in the trajectory and in the metrics; a wrong answer is no failure. Places are counted."""

import asyncio
import functools

import grpc
import pytest
from prometheus_client import REGISTRY

from headrace import trajectory as records
from headrace.v1 import trajectory_pb2 as pb
from services.rollout.episode import run_group
from tests.engine_script import Script
from tests.rollout.episodes import outcome, start_episodes
from tests.rollout.rig import eventually, task
from tests.rollout.scripted_environment import Abort, says, turns

LIMITS = {
    "rollout__episode_attempts": 1,
    "environments__guess_number__step_timeout_s": 0.3,
    "environments__guess_number__reset_timeout_s": 60,
}


async def slow(_task, _session):
    yield says("a")
    await asyncio.sleep(60)
    yield says("found", 1.0, terminated=True)


async def raises(_task, _session):
    yield says("a")
    raise RuntimeError("broken")


async def unavailable(_task, _session):
    yield says("a")
    raise Abort(grpc.StatusCode.UNAVAILABLE)


async def busy(_task, _session):
    raise Abort(grpc.StatusCode.RESOURCE_EXHAUSTED)
    yield


async def unknown(_task, _session):
    raise Abort(grpc.StatusCode.NOT_FOUND)
    yield


async def shows(_task, _session):
    picture = pb.Image(data=b"\x89PNG\r\n\x1a\n", mime_type="image/png")
    response = says("see")
    response.messages[0].images.append(picture)
    yield response


async def shows_what_is_no_image(_task, _session):
    response = says("see")
    response.messages[0].images.add(data=b"<svg>", mime_type="image/svg+xml")
    yield response


@pytest.fixture
def episodes(tmp_path):
    return functools.partial(start_episodes, tmp_path)


@pytest.mark.parametrize(
    ("play", "cause", "word"),
    [
        (slow, "deadline", "within 0.3 s"),
        (raises, "other", "UNKNOWN"),  # the scripted server's own; an SDK's raise is INTERNAL, see test_environment.py
        (unavailable, "unavailable", "UNAVAILABLE"),
        (unknown, "refused", "NOT_FOUND"),
        (shows, "template", "no place for images"),
        (shows_what_is_no_image, "contract", "image/svg+xml"),
    ],
)
async def test_each_failure_has_its_cause(episodes, play, cause, word):
    labels = {"environment": "guess_number", "cause": cause}
    before = REGISTRY.get_sample_value("headrace_rollout_failed_episodes_total", labels) or 0
    async with episodes(play, **LIMITS) as run:
        trajectory = await run.run()
    assert (outcome(trajectory), trajectory.cause) == ("ENVIRONMENT_ERROR", cause)
    assert word in trajectory.status_detail and not records.is_trainable(trajectory)
    assert REGISTRY.get_sample_value("headrace_rollout_failed_episodes_total", labels) == before + 1


async def test_an_engine_and_a_crowd_have_their_causes(episodes):
    async with episodes(turns(1), Script(fault="500", fault_rate=1), rollout__engine_attempts=2) as run:
        trajectory = await run.run()
    assert (outcome(trajectory), trajectory.cause) == ("ENGINE_ERROR", "engine")
    async with episodes(busy, environments__guess_number__episode_timeout_s=0.5) as run:
        trajectory = await run.run()
    assert (outcome(trajectory), trajectory.cause) == ("ENVIRONMENT_ERROR", "busy")


async def test_only_a_wrong_answer_is_trained_on_with_zero(episodes):
    async with episodes(turns(1, reward=0.0)) as run:
        trajectory = await run.run()
    assert (outcome(trajectory), trajectory.cause) == ("COMPLETED", "")
    assert records.is_trainable(trajectory) and records.total_reward(trajectory) == 0.0


async def test_an_environment_has_its_own_attempts(episodes):
    async with episodes(raises, environments__guess_number__episode_attempts=2, rollout__episode_attempts=9) as run:
        assert (await run.run()).attempts == 2


async def test_an_environments_episodes_wait_for_a_place_of_its_own(episodes):
    most = 0

    async with episodes(None, rollout__group_size=6, environments__guess_number__gateway_max_episodes=2) as run:

        async def play(_task, _session):
            nonlocal most
            most = max(most, run.environment.open)
            yield says("a")
            await asyncio.sleep(0.05)
            yield says("found", 1.0, terminated=True)

        run.environment.play = play
        queued_s = asyncio.get_running_loop().time()
        trajectories = await run_group(task(), world=run.world, queued_s=queued_s)
    assert most <= 2 and [outcome(trajectory) for trajectory in trajectories] == ["COMPLETED"] * 6
    assert sorted(trajectory.timings.queue_s >= 0.05 for trajectory in trajectories).count(True) >= 4


async def test_a_straggler_waits_no_longer_than_its_group(episodes):
    limits = {"rollout__group_timeout_s": 0.6, "environments__guess_number__gateway_max_episodes": 1}
    async with episodes(slow, **(LIMITS | limits | {"environments__guess_number__step_timeout_s": 60})) as run:
        now_s = asyncio.get_running_loop().time()
        trajectories = await run_group(task(), world=run.world, queued_s=now_s)
        await eventually(lambda: run.environment.open == 0, timeout_s=60)
    assert [(outcome(one), one.cause) for one in trajectories] == [("CANCELLED", "straggler")] * 2


async def test_the_calls_of_a_turn_come_at_once_and_their_answers_go_back_in_order(episodes):
    seen = []

    async def play(_task, _session):
        action = yield says("a")
        seen.append(action)
        answers = [pb.Message(role="tool", tool_call_id=f"call_{n}", content=word) for n, word in enumerate("12")]
        step = says("")
        del step.messages[:]
        step.messages.extend(answers)
        yield step
        yield says("found", 1.0, terminated=True)

    async with episodes(play, rollout__tool_parser="pythonic") as run:
        trajectory = await run.run()
        follow = run.world.renderer.decode(records.token_ids(trajectory.turns[1].observation_token_ids))
    assert len(seen) == 1 and follow.index("1") < follow.index("2")
    assert [message.tool_call_id for message in trajectory.messages if message.role == "tool"] == ["call_0", "call_1"]
