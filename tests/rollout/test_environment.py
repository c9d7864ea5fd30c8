"""The client of environments against a real gRPC server that follows a play."""

import asyncio

import grpc
import pytest

from headrace import config
from headrace.v1 import environment_service_pb2 as pb
from headrace.v1 import environment_service_pb2_grpc
from headrace.v1.trajectory_pb2 import PURPOSE_DEMONSTRATION, Message
from services.rollout.environment import Environment, EnvironmentBusy, EnvironmentFailure, EnvironmentRefusal
from tests.processes import free_port
from tests.rollout.rig import eventually, task
from tests.rollout.scripted_environment import Abort, ScriptedEnvironment, says, turns

ACTION = pb.Action(message=Message(role="assistant", content="1"))


@pytest.fixture
async def play():
    """Plays one session: reset, then `actions` steps. Returns the last response."""
    stack = []

    async def run(script, *, actions=1, purpose=None, **limits):
        server = await ScriptedEnvironment.start(script)
        environment = Environment("e", settings(server.address, **limits))
        stack.extend([environment.close, server.stop])
        async with environment.session() as session:
            step = await session.reset(task(purpose=purpose) if purpose else task())
            for _ in range(actions):
                step = await session.step(ACTION)
        await eventually(lambda: server.open == 0)
        return step

    yield run
    for stop in stack:
        await stop()


def settings(address, **limits):
    return config.Environment.model_validate({"address": address, **limits})


def steps(*responses):
    async def play(_task, _session):
        for response in responses:
            if isinstance(response, Exception):
                raise response
            yield response

    return play


async def test_one_response_each(play):
    assert await play(turns(3), actions=3) == says("found", 1.0, terminated=True)


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        (grpc.StatusCode.INTERNAL, EnvironmentFailure, "raised"),
        (grpc.StatusCode.UNAVAILABLE, EnvironmentFailure, "unavailable"),
        (grpc.StatusCode.CANCELLED, EnvironmentFailure, "other"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, EnvironmentBusy, None),
        (grpc.StatusCode.NOT_FOUND, EnvironmentRefusal, None),
        (grpc.StatusCode.FAILED_PRECONDITION, EnvironmentRefusal, None),
    ],
)
async def test_a_status_at_the_reset_has_a_name(play, code, kind, reason):
    with pytest.raises(kind, match=f"reset: {code.name}: by the play") as failure:
        await play(steps(Abort(code)))
    assert getattr(failure.value, "reason", None) == reason


async def test_a_status_at_a_step_is_a_failure(play):
    with pytest.raises(EnvironmentFailure, match="step: RESOURCE_EXHAUSTED"):
        await play(steps(says("a"), Abort(grpc.StatusCode.RESOURCE_EXHAUSTED)))


async def test_a_stream_that_just_ends_is_a_failure(play):
    with pytest.raises(EnvironmentFailure, match="ended instead of answering the step"):
        await play(steps(says("a")))


async def test_a_silent_environment_meets_its_deadline(play):
    async def silent(_task, _session):
        yield says("a")
        await asyncio.sleep(60)
        yield says("b")

    with pytest.raises(EnvironmentFailure, match=r"no response to the step within 0.1 s"):
        await play(silent, step_timeout_s=0.1)


@pytest.mark.parametrize(
    ("response", "word"),
    [
        (says("b", float("nan")), "reward is nan"),
        (says("b", float("-inf"), terminated=True), "reward is -inf"),
        (says("b", 1.0, metrics={"m": float("nan")}), "metrics hold"),
        (says("b", 1.0, terminated=True, truncated=True), "both set"),
        (pb.InteractResponse(), "no message follows"),
        (pb.InteractResponse(messages=[Message(role="oracle", content="b")]), "roles are .'oracle'"),
    ],
)
async def test_a_broken_contract_is_a_failure(play, response, word):
    with pytest.raises(EnvironmentFailure, match=word) as failure:
        await play(steps(says("a"), response))
    assert failure.value.reason == "contract"


async def test_an_end_before_the_first_action_is_a_failure(play):
    with pytest.raises(EnvironmentFailure, match="before its first action"):
        await play(steps(says("a", 1.0, terminated=True)), actions=0)


async def test_a_demonstration_must_demonstrate(play):
    expert = says("a", demonstration=Message(role="assistant", content="1"))
    end = says("b", 1.0, terminated=True)
    assert await play(steps(expert, end), purpose=PURPOSE_DEMONSTRATION) == end
    with pytest.raises(EnvironmentFailure, match="no assistant message demonstrates"):
        await play(steps(says("a"), end), purpose=PURPOSE_DEMONSTRATION)


async def test_a_stream_that_ended_while_the_policy_thought_is_a_failure():
    server = await ScriptedEnvironment.start(turns(3))
    environment = Environment("e", settings(server.address))
    async with environment.session() as session:
        await session.reset(task())
        await server.stop()
        await asyncio.sleep(0.2)
        with pytest.raises(EnvironmentFailure):
            await session.step(ACTION)
    await environment.close()


async def test_a_cancelled_session_stays_cancelled_and_closes():
    async def silent(_task, _session):
        await asyncio.sleep(60)
        yield says("a")

    server = await ScriptedEnvironment.start(silent)
    environment = Environment("e", settings(server.address))

    async def reset():
        async with environment.session() as session:
            await session.reset(task())

    running = asyncio.create_task(reset())
    await eventually(lambda: server.open == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await eventually(lambda: server.open == 0)
    await environment.close()
    await server.stop()


async def test_the_server_may_come_later():
    port = free_port()
    environment = Environment("e", settings(f"127.0.0.1:{port}"))

    async def reset():
        async with environment.session() as session:
            return await session.reset(task())

    running = asyncio.create_task(reset())
    await asyncio.sleep(0.3)
    server = await ScriptedEnvironment.start(turns(1), listen=f"127.0.0.1:{port}")
    assert await asyncio.wait_for(running, 10) == says("guess a number")
    await environment.close()
    await server.stop()


@pytest.mark.slow
async def test_a_server_with_the_default_settings_may_take_minutes_to_answer():
    async def slow(_task, _session):
        yield says("guess a number")
        await asyncio.sleep(150)
        yield says("found", 1.0, terminated=True)

    server = grpc.aio.server()
    environment_service_pb2_grpc.add_EnvironmentServiceServicer_to_server(ScriptedEnvironment(slow), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    environment = Environment("e", settings(f"127.0.0.1:{port}", step_timeout_s=200))
    async with environment.session() as session:
        await session.reset(task())
        assert (await session.step(ACTION)).terminated
    await environment.close()
    await server.stop(0)
