"""What fails around an episode gets its own status and is never a reward."""

import asyncio
import functools

import grpc
import pytest

from headrace import rpc
from headrace import trajectory as records
from headrace.v1 import environment_service_pb2_grpc
from services.envs import catalog
from services.envs.server import SERVICE, EnvironmentServer
from tests.engine_script import Script
from tests.rollout import rig
from tests.rollout.episodes import Episodes, outcome, start_episodes
from tests.rollout.rig import task
from tests.rollout.scripted_environment import Abort, ScriptedEnvironment, says, turns
from tests.scripted_engine import ScriptedEngine

PROMPT = [4, 7, 8, 9, 5]  # <user> guess a number <assistant>


@pytest.fixture
def episodes(tmp_path):
    return functools.partial(start_episodes, tmp_path)


@pytest.mark.parametrize(
    ("play", "script", "status", "word"),
    [
        ("hangs_at_reset", Script(), "ENVIRONMENT_ERROR", "did not reset"),
        ("busy", Script(), "ENVIRONMENT_ERROR", "RESOURCE_EXHAUSTED"),
        ("sound", Script(draining=True), "ENGINE_ERROR", "no engine is ready"),
        ("sound", Script(fault="500", fault_rate=1), "ENGINE_ERROR", "500 by the script"),
    ],
)
async def test_the_time_limit_blames_who_failed_before_it(episodes, play, script, status, word):
    async def hangs_at_reset(_task, _session):
        await asyncio.sleep(60)
        yield says("a")

    async def busy(_task, _session):
        raise Abort(grpc.StatusCode.RESOURCE_EXHAUSTED)
        yield

    plays = {"hangs_at_reset": hangs_at_reset, "busy": busy, "sound": turns(1)}
    async with episodes(plays[play], script, rollout__episode_timeout_s=0.6, rollout__engine_attempts=99) as run:
        trajectory = await run.run()
    assert outcome(trajectory) == status and word in trajectory.status_detail
    assert not records.is_trainable(trajectory)


async def test_an_episode_that_has_ended_is_not_cut_off_while_its_session_closes(tmp_path):
    class Lingering(ScriptedEnvironment):
        """Ends its streams late."""

        async def Interact(self, requests, context):
            await super().Interact(requests, context)
            await asyncio.sleep(60)

    engine, environment = await ScriptedEngine.start(), await Lingering.start(turns(1))
    limits = {"rollout__episode_timeout_s": 0.5}
    async with rig.world(tmp_path, engines=[engine.url], environment=environment.address, **limits) as world:
        trajectory = await Episodes(engine, environment, world).run()
    await environment.stop()
    await engine.stop()
    assert outcome(trajectory) == "COMPLETED" and records.total_reward(trajectory) == 1.0
    assert trajectory.timings.total_s < 0.9


def breaks(kind, sessions):
    """Breaks in the given sessions (numbers), each after two good turns; else ends well."""

    async def play(_task, session):
        yield says("guess a number")
        yield says("higher", 0.125)
        if session in sessions:
            match kind:
                case "raises":
                    raise Abort(grpc.StatusCode.INTERNAL, "out of fuel")
                case "dies":
                    raise Abort(grpc.StatusCode.UNAVAILABLE)
                case "hangs":
                    await asyncio.sleep(60)
                case "nan":
                    yield says("higher", float("nan"))
                case "no_reward":
                    return
        yield says("found", 1.0, terminated=True)

    return play


@pytest.mark.parametrize("kind", ["raises", "dies", "hangs", "nan", "no_reward"])
async def test_a_failed_session_is_replaced_by_a_fresh_one(episodes, kind):
    async with episodes(
        breaks(kind, {1, 2}), Script(tokens="random"), environments__guess_number__step_timeout_s=0.2
    ) as run:
        trajectory = await run.run()
    assert outcome(trajectory) == "COMPLETED" and trajectory.attempts == 3
    assert records.total_reward(trajectory) == 1.125 and len(trajectory.turns) == 2
    assert len(trajectory.messages) == 5
    assert run.environment.tasks == [task()] * 3
    assert run.engine.requests[-1]["input_ids"][:5] == PROMPT


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("raises", "INTERNAL: out of fuel"),
        ("dies", "UNAVAILABLE"),
        ("hangs", "within 0.2 s"),
        ("nan", "reward is nan"),
    ],
)
async def test_an_environment_that_keeps_failing_is_an_error_and_no_reward(episodes, kind, word):
    async with episodes(
        breaks(kind, {1, 2, 3}), Script(tokens="random"), environments__guess_number__step_timeout_s=0.2
    ) as run:
        trajectory = await run.run()
    assert outcome(trajectory) == "ENVIRONMENT_ERROR" and word in trajectory.status_detail
    assert trajectory.attempts == 3 and not trajectory.terminated and not trajectory.truncated
    assert not records.is_trainable(trajectory)


async def test_an_end_without_any_reward_is_refused(episodes):
    async def play(_task, _session):
        yield says("guess a number")
        yield says("found", terminated=True)

    async with episodes(play, Script(tokens="random")) as run:
        trajectory = await run.run()
    assert outcome(trajectory) == "ENVIRONMENT_ERROR" and "without giving any reward" in trajectory.status_detail


async def test_a_refused_task_is_tried_once(episodes):
    async def play(_task, _session):
        raise Abort(grpc.StatusCode.NOT_FOUND, "no such split")
        yield

    async with episodes(play) as run:
        trajectory = await run.run()
    assert outcome(trajectory) == "ENVIRONMENT_ERROR" and "no such split" in trajectory.status_detail
    assert trajectory.attempts == 1 and len(run.environment.tasks) == 1


async def test_a_busy_environment_costs_no_attempt(episodes):
    async def play(_task, session):
        if session < 6:
            raise Abort(grpc.StatusCode.RESOURCE_EXHAUSTED)
        yield says("guess a number")
        yield says("found", 1.0, terminated=True)

    async with episodes(play, Script(tokens="random")) as run:
        trajectory = await run.run()
    assert outcome(trajectory) == "COMPLETED" and trajectory.attempts == 1


@pytest.mark.parametrize("fault", ["500", "cut", "garbage", "wrong_spans", "nan_logprobs"])
async def test_an_engine_that_recovers_costs_nothing(episodes, fault):
    async with episodes(turns(2), Script(tokens="random", faults=[fault, "ok", fault, fault])) as run:
        trajectory = await run.run()
    assert outcome(trajectory) == "COMPLETED" and trajectory.attempts == 1 and len(trajectory.turns) == 2


@pytest.mark.parametrize(("fault", "word"), [("500", "2 calls failed"), ("hang", "no reply"), ("400", "refused")])
async def test_an_engine_that_does_not_is_an_error(episodes, fault, word):
    script = Script(fault=fault, fault_rate=1)
    async with episodes(turns(2), script, rollout__engine_attempts=2, rollout__engine_timeout_s=0.2) as run:
        trajectory = await run.run()
        assert outcome(trajectory) == "ENGINE_ERROR" and word in trajectory.status_detail
        await rig.eventually(lambda: run.environment.open == 0)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("Raises", "the simulator is out of fuel"),
        ("Hangs", "no response to the step within 0.3 s"),
        ("NaNReward", "nan"),
        ("InfiniteMetric", "inf"),
        ("NoReward", "reward"),
        ("Garbage", "INTERNAL"),
        ("Silent", "message"),
    ],
)
async def test_a_faulty_environment_in_a_real_server_is_an_error_and_no_reward(tmp_path, name, word):
    servicer = EnvironmentServer({"guess_number": catalog.find(f"tests.envs.faulty:{name}", {})}, capacity=4)
    add = environment_service_pb2_grpc.add_EnvironmentServiceServicer_to_server
    server = await rpc.Server.start("127.0.0.1:0", [(SERVICE, add, servicer)])
    engine = await ScriptedEngine.start(Script(tokens="random"))
    address = f"127.0.0.1:{server.port}"
    limits = {"environments__guess_number__step_timeout_s": 0.3, "rollout__episode_attempts": 2}
    async with servicer, rig.world(tmp_path, engines=[engine.url], environment=address, **limits) as world:
        trajectory = await Episodes(engine, None, world).run()
        await server.stop(0)
    await engine.stop()
    assert outcome(trajectory) == "ENVIRONMENT_ERROR" and trajectory.attempts == 2
    assert word in trajectory.status_detail and "\n" not in trajectory.status_detail
    assert records.total_reward(trajectory) is None and not records.is_trainable(trajectory)
