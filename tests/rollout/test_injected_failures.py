"""A tenth of the episodes fails, each in its way, and the mean reward of what is trained stays where it was."""

import asyncio
import contextlib
import functools
import itertools

import pytest
from aiohttp import web

from headrace import rpc
from headrace import trajectory as records
from headrace.v1 import environment_service_pb2_grpc
from services.envs.examination import Examination
from services.envs.server import SERVICE, EnvironmentServer
from services.rollout.episode import run_group
from tests.engine_script import Script
from tests.envs import faulty
from tests.envs.web_service import web_service
from tests.rollout import rig
from tests.rollout.episodes import outcome
from tests.scripted_engine import ScriptedEngine

TASKS = 40
GROUP_SIZE = 8


@contextlib.asynccontextmanager
async def gateway(folder, make):
    """A gateway's world in front of a real server of one environment."""
    engine = await ScriptedEngine.start(Script(tokens="random"))
    servicer = EnvironmentServer({"guess_number": make}, capacity=1000)
    add = environment_service_pb2_grpc.add_EnvironmentServiceServicer_to_server
    async with servicer:
        server = await rpc.Server.start("127.0.0.1:0", [(SERVICE, add, servicer)])
        limits = {"rollout__group_size": GROUP_SIZE, "rollout__episode_attempts": 1}
        limits["environments__guess_number__step_timeout_s"] = 60
        async with rig.world(folder, engines=[engine.url], environment=f"127.0.0.1:{server.port}", **limits) as world:
            yield world
        await server.stop(0)
    await engine.stop()


async def trained(world) -> tuple[list[float], list[str]]:
    """Rewards that enter a loss, each checked against its task's, and the statuses of all episodes."""
    rewards, statuses = [], []
    for number in range(0, TASKS, 8):
        tasks = [rig.task(number + n) for n in range(8)]
        now = asyncio.get_running_loop().time()
        for task, group in zip(
            tasks, await asyncio.gather(*[run_group(task, world=world, queued_s=now) for task in tasks]), strict=True
        ):
            for trajectory in group:
                statuses.append(outcome(trajectory))
                reward = records.total_reward(trajectory)
                if records.is_trainable(trajectory):
                    assert reward == float(task.index % 2)
                    rewards.append(reward)
                else:
                    assert reward is None
    return rewards, statuses


def every_tenth(broken, sound):
    """Makes an environment that breaks for every tenth episode, whatever its task."""
    made = itertools.count()
    return lambda: broken() if next(made) % 10 == 5 else sound()


@pytest.mark.parametrize(
    ("broken", "when"),
    [(faulty.Raises, "step"), (faulty.Raises, "end"), (faulty.NoReward, "step"), (faulty.Exits, "end")],
)
async def test_environments_that_break(tmp_path, broken, when):
    make = every_tenth(functools.partial(broken, when=when), faulty.Sound)
    async with gateway(tmp_path, make) as world:
        rewards, statuses = await trained(world)
    check(rewards, statuses)


async def test_a_judge_that_fails(tmp_path):
    asked = itertools.count()

    def judgement(_number: int, request: dict) -> web.Response:
        text = request["body"]["messages"][0]["content"]
        failures = [web.Response(status=500), web.Response(text="<html>"), web.Response(text="{}"), _said("I refuse.")]
        number = next(asked)
        return failures[number // 10 % 4] if number % 10 == 5 else _said(f"SCORE: {int('task 1' in text)}")

    async with web_service(judgement) as service:
        judge = {"url": service.url, "model": "grader", "highest": 1, "judgements": 1}
        tasks = [{"prompt": f"task {n}"} for n in range(2)]
        make = functools.partial(Examination, tasks=tasks, judge=judge, attempts=1, timeout_s=60)
        async with gateway(tmp_path, make) as world:
            rewards, statuses = await trained(world)
    check(rewards, statuses)


def check(rewards: list[float], statuses: list[str]) -> None:
    episodes = TASKS * GROUP_SIZE
    assert len(statuses) == episodes and set(statuses) == {"COMPLETED", "ENVIRONMENT_ERROR"}
    assert statuses.count("ENVIRONMENT_ERROR") == episodes // 10 == episodes - len(rewards)
    # The failures fall on tasks of either reward, so only chance moves the mean; a false zero for each would be 0.05.
    assert sum(rewards) / len(rewards) == pytest.approx(0.5, abs=0.04)


def _said(text: str) -> web.Response:
    return web.json_response({"choices": [{"message": {"content": text}}]})
