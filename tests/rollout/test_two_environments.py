"""Two environments whose tasks have the same ids, in flight together, never mix."""

import asyncio
import contextlib
import dataclasses
import functools

from headrace import rpc
from headrace import trajectory as records
from headrace.config.environment import Environment as Section
from headrace.v1 import environment_service_pb2_grpc
from services.envs.examination import Examination
from services.envs.server import SERVICE, EnvironmentServer
from services.rollout.environment import Environment
from services.rollout.episode import run_group
from tests.engine_script import Script
from tests.rollout import rig
from tests.rollout.episodes import ids
from tests.scripted_engine import ScriptedEngine


async def worth_0(answer, task):
    await asyncio.sleep(0.01)
    return 0.0


async def worth_1(answer, task):
    return 1.0


def environment(prompt: str, verifier: str):
    tasks = [{"prompt": prompt}]
    return functools.partial(Examination, tasks=tasks, verifier=f"{__name__}:{verifier}")


async def test_one_server_for_both_and_one_for_each(tmp_path):
    makers = {"guess_number": environment("higher", "worth_0"), "twin": environment("lower", "worth_1")}
    add = environment_service_pb2_grpc.add_EnvironmentServiceServicer_to_server
    engine = await ScriptedEngine.start(Script(tokens="random"))
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for served in (makers, makers, {"twin": makers["twin"]}):
            servicer = await stack.enter_async_context(EnvironmentServer(served, capacity=1000))
            server = await rpc.Server.start("127.0.0.1:0", [(SERVICE, add, servicer)])
            stack.push_async_callback(server.stop, 0)
            addresses.append(f"127.0.0.1:{server.port}")
        for first, second in [(addresses[0], addresses[0]), (addresses[1], addresses[2])]:
            async with rig.world(tmp_path, engines=[engine.url], environment=first, rollout__group_size=4) as world:
                twin = Environment("twin", Section(address=second))
                stack.push_async_callback(twin.close)
                both = dataclasses.replace(world, environments={**world.environments, "twin": twin})
                await check(both)
    await engine.stop()


async def check(world) -> None:
    now = asyncio.get_running_loop().time()
    tasks = [rig.task(n, environment=name) for n in range(8) for name in ("guess_number", "twin")]
    groups = await asyncio.gather(*[run_group(task, world=world, queued_s=now) for task in tasks])
    for task, group in zip(tasks, groups, strict=True):
        word, reward = ("higher", 0.0) if task.environment == "guess_number" else ("lower", 1.0)
        for trajectory in group:
            assert records.total_reward(trajectory) == reward
            assert rig.WORDS.index(word) + 7 in ids(trajectory.turns[0].observation_token_ids)
