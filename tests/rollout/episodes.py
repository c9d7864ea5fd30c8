"""Runs single episodes against a scripted engine and an environment, and reads what came of them."""

import asyncio
import contextlib

from headrace import trajectory as records
from headrace.v1 import trajectory_pb2 as pb
from headrace.v1.trajectory_pb2 import Message
from services.rollout.episode import Sampling, run_episode
from tests.rollout import rig
from tests.rollout.rig import task
from tests.rollout.scripted_environment import ScriptedEnvironment
from tests.scripted_engine import ScriptedEngine


class Episodes:
    """Runs episodes of a play against a scripted engine."""

    def __init__(self, engine, environment, world):
        self.engine, self.environment, self.world = engine, environment, world
        self.vocabulary_size = world.engines.vocabulary_size

    def action(self, text):
        return self.world.renderer.action(Message(role="assistant", content=text))

    async def run(self, task_=None, **options):
        trajectory = await run_episode(
            task_ or task(),
            "t",
            world=self.world,
            sampling=Sampling(1.0, self.world.settings.max_action_tokens),
            queued_s=asyncio.get_running_loop().time(),
            **options,
        )
        purpose = task_.purpose if task_ else pb.PURPOSE_TRAINING
        records.check_trajectory(trajectory, purpose=purpose, vocabulary_size=self.vocabulary_size)
        return trajectory


@contextlib.asynccontextmanager
async def start_episodes(folder, play, script=None, *, policy_version=3, **overrides):
    """Episodes of a play, sampled by a scripted engine."""
    engine = await ScriptedEngine.start(script, policy_version=policy_version)
    environment = await ScriptedEnvironment.start(play)
    try:
        async with rig.world(folder, engines=[engine.url], environment=environment.address, **overrides) as world:
            yield Episodes(engine, environment, world)
    finally:
        await environment.stop()
        await engine.stop()


def ids(data):
    return records.token_ids(data).tolist()


def outcome(trajectory):
    return pb.EpisodeStatus.Name(trajectory.status).removeprefix("EPISODE_STATUS_")
