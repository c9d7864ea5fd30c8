"""The loop: a policy acts in an environment until the task ends or a limit does.

A Task enters and a Trajectory leaves, whatever happens: failures are statuses, never rewards. `run_episode` plays one
episode, `run_group` all episodes of a ticket at once. Both wait for environments and engines, and for nothing else.

Token ids are the truth. The first prompt is rendered once, an action is kept exactly as the engine sampled it, and an
observation contributes only the ids that the chat template adds for its messages; nothing is tokenized twice. Text is
decoded from the ids only for the environment and for people.

How an episode ends:

    the environment terminates                            COMPLETED
    the environment truncates, or max_turns actions       TRUNCATED_TURNS
    no room for another token in max_episode_tokens       TRUNCATED_TOKENS
    episode_timeout_s                                     TRUNCATED_TIME; ENGINE_ERROR while engines fail or are absent,
                                                          ENVIRONMENT_ERROR before the first prompt
    the environment failed episode_attempts sessions      ENVIRONMENT_ERROR
    the engines failed engine_attempts calls              ENGINE_ERROR
    group_timeout_s                                       CANCELLED

A limit keeps the rewards that were given before it struck. If there were none, nobody has judged the episode:
the trajectory carries no reward, `is_trainable` refuses it and it is counted as unrewarded; it never becomes a 0. An
environment that ends its episode without ever having given a reward broke its contract: ENVIRONMENT_ERROR.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from headrace import config, tracing
from headrace.trajectory import total_reward
from headrace.v1 import trajectory_pb2 as pb
from services.rollout import metrics, tools
from services.rollout.chat_template import RenderError
from services.rollout.environment import EnvironmentBusy, EnvironmentFailure, EnvironmentRefusal
from services.rollout.inference import EngineError, Engines
from services.rollout.policy import Actor, acting
from services.rollout.record import Outcome, Record, status_name
from services.rollout.renderer import Renderer
from services.rollout.seat import Seat, Source, Stage

_LONG_TEXT = 20_000  # characters whose rendering would hold up the event loop; a thread does it
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0  # for a place at a busy environment


@dataclasses.dataclass(frozen=True)
class World:
    """What every episode of a gateway uses."""

    settings: config.Rollout
    renderer: Renderer
    engines: Engines
    environments: Mapping[str, Source]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the policy samples."""

    temperature: float
    max_action_tokens: int


def sampling_of(task: pb.Task, settings: config.Rollout) -> Sampling:
    """How the run's config samples for this task's purpose."""
    evaluates = task.purpose == pb.PURPOSE_EVALUATION
    return Sampling(settings.evaluation_temperature if evaluates else settings.temperature, settings.max_action_tokens)


def group_size(task: pb.Task, settings: config.Rollout) -> int:
    """Episodes of a ticket: an expert need not be asked twice."""
    return 1 if task.purpose == pb.PURPOSE_DEMONSTRATION else settings.group_size


def unknown_environment(task: pb.Task, world: World) -> str:
    """What to say of a task whose environment the run does not have."""
    return f"environment {task.environment!r} is unknown; the run's config has {sorted(world.environments)}"


async def run_group(
    task: pb.Task, *, world: World, queued_s: float, on_end: Callable[[], None] = lambda: None
) -> list[pb.Trajectory]:
    """All episodes of a ticket, at once; group_timeout_s after the first engine is ready the stragglers are cut off.

    Args:
        task: what to run.
        world: what episodes use.
        queued_s: when the ticket was claimed, in seconds of the loop's clock.
        on_end: called as each episode ends.
    """
    if task.purpose != pb.PURPOSE_DEMONSTRATION:
        await world.engines.wait_ready()
    cutoff_s = asyncio.get_running_loop().time() + world.settings.group_timeout_s

    async def run(number: int) -> pb.Trajectory:
        trajectory_id = f"{task.task_id}-{number}"
        sampling = sampling_of(task, world.settings)
        try:
            with tracing.trajectory(trajectory_id, environment=task.environment) as span:
                trajectory = await run_episode(
                    task, trajectory_id, world=world, sampling=sampling, queued_s=queued_s, cutoff_s=cutoff_s
                )
                span.set(status=status_name(trajectory.status), turns=len(trajectory.turns))
            return trajectory
        finally:
            on_end()

    async with asyncio.TaskGroup() as tasks:
        episodes = [tasks.create_task(run(number)) for number in range(group_size(task, world.settings))]
    return [episode.result() for episode in episodes]


async def run_episode(
    task: pb.Task,
    trajectory_id: str,
    *,
    world: World,
    sampling: Sampling,
    queued_s: float,
    cutoff_s: float | None = None,
) -> pb.Trajectory:
    """One episode, on fresh environment sessions until one lasts. It begins when its environment has a place for it.

    Args:
        task: what to run; its environment is one of the world's.
        trajectory_id: what to call it.
        world: what it uses.
        sampling: how the policy samples; a demonstration samples nothing.
        queued_s: when its ticket was claimed, in seconds of the loop's clock.
        cutoff_s: when a straggler is cut off, likewise.
    """
    environment = world.environments[task.environment]
    async with contextlib.AsyncExitStack() as places:
        try:
            async with asyncio.timeout_at(cutoff_s):
                seat = await places.enter_async_context(environment.place(task))
        except TimeoutError:
            line = "straggler: group_timeout_s passed before there was a place"
            record = Record(task, trajectory_id, queued_s=queued_s)
            return record.end(Outcome(pb.EPISODE_STATUS_CANCELLED, line, "straggler"))
        record = Record(task, trajectory_id, queued_s=queued_s)
        seat.begin(record.trajectory)
        timeout_s = environment.settings.episode_timeout_s or world.settings.episode_timeout_s
        limit_s = record.started_s + timeout_s
        with metrics.running_episodes.track_inprogress():
            try:
                async with asyncio.timeout_at(limit_s if cutoff_s is None else min(limit_s, cutoff_s)):
                    outcome = await _attempt(
                        task, record, seat, settings=environment.settings, world=world, sampling=sampling
                    )
            except TimeoutError:
                if record.outcome is not None:
                    outcome = record.outcome
                elif cutoff_s is not None and cutoff_s <= limit_s:
                    line = "straggler: group_timeout_s passed"
                    outcome = Outcome(pb.EPISODE_STATUS_CANCELLED, line, "straggler")
                else:
                    outcome = record.out_of_time()
        trajectory = record.end(outcome)
        seat.end()
        return trajectory


async def _attempt(
    task: pb.Task, record: Record, seat: Seat, *, settings: config.Environment, world: World, sampling: Sampling
) -> Outcome:
    """Sessions until one lasts to the end of its episode, or too many have failed."""
    wait_s = _FIRST_WAIT_S
    attempts = settings.episode_attempts or world.settings.episode_attempts
    while True:
        name = f"{record.trajectory_id}-{secrets.token_hex(4)}"  # two gateways may run the same ticket
        try:
            with acting(
                task, name, engines=world.engines, renderer=world.renderer, temperature=sampling.temperature
            ) as actor:
                record.restart(actor)
                with tracing.span("session", attempt=record.attempts):
                    async with seat.session() as session:
                        record.outcome = await _play(
                            task,
                            record,
                            session,
                            actor,
                            world=world,
                            max_turns=settings.max_turns,
                            max_action_tokens=sampling.max_action_tokens,
                        )
                return record.outcome
        except EnvironmentBusy as error:
            record.retract(str(error))
            with record.environment_time():
                await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        except EnvironmentFailure as error:
            record.trouble, record.cause = str(error), error.reason
            if record.attempts >= attempts:
                return Outcome(pb.EPISODE_STATUS_ENVIRONMENT_ERROR, record.trouble, record.cause)
        except EnvironmentRefusal as error:
            return Outcome(pb.EPISODE_STATUS_ENVIRONMENT_ERROR, str(error), "refused")
        except RenderError as error:
            line = f"the chat template refuses the environment's messages: it {error}"
            return Outcome(pb.EPISODE_STATUS_ENVIRONMENT_ERROR, line, "template")
        except EngineError as error:
            return Outcome(pb.EPISODE_STATUS_ENGINE_ERROR, str(error), "engine")


async def _play(
    task: pb.Task,
    record: Record,
    session: Stage,
    actor: Actor,
    *,
    world: World,
    max_turns: int,
    max_action_tokens: int,
) -> Outcome:
    """One session, from reset to end."""
    renderer = world.renderer
    with record.environment_time(), tracing.span("reset"):
        step = await session.reset(task)
    record.begin(step)
    offered = step.tools
    observation = await _render(step.messages, renderer.first, step.messages, offered)
    while True:
        room = world.settings.max_episode_tokens - actor.length - len(observation)
        if room < 1:
            return Outcome(pb.EPISODE_STATUS_TRUNCATED_TOKENS)
        actor.observe(observation)
        with record.engine_time(), tracing.span("engine call") as span:
            sample = await actor.act(step, min(room, max_action_tokens))
            if sample is not None:
                span.set(tokens=len(sample.token_ids), policy_versions=[version for version, _ in sample.version_spans])
        if sample is None:
            return Outcome(pb.EPISODE_STATUS_TRUNCATED_TOKENS, "the demonstration is longer than an action may be")
        record.add_turn(observation, sample)
        text = renderer.decode(sample.token_ids)
        action = tools.parse(text, world.settings.tool_parser, tools=offered, thinking=world.settings.thinking)
        metrics.malformed_tool_calls.inc(len(action.malformed_tool_calls))
        with record.environment_time(), tracing.span("step"):
            step = await session.step(action)
        record.add_step(action, step)
        if step.terminated or step.truncated:
            if total_reward(record.trajectory) is None:
                raise EnvironmentFailure("no_reward", "the environment ended the episode without giving any reward")
            if step.terminated:
                return Outcome(pb.EPISODE_STATUS_COMPLETED)
            return Outcome(pb.EPISODE_STATUS_TRUNCATED_TURNS, "the environment cut it off")
        if record.turn_count >= max_turns:
            return Outcome(pb.EPISODE_STATUS_TRUNCATED_TURNS)
        observation = await _render(step.messages, renderer.follow, sample.token_ids, step.messages)


async def _render(messages: Sequence[pb.Message], render: Callable[..., np.ndarray], *arguments: object) -> np.ndarray:
    """The ids that `render` gives; long text is tokenized in a thread, which leaves the event loop to the others."""
    if sum(len(message.content) for message in messages) < _LONG_TEXT:
        return render(*arguments)
    return await asyncio.to_thread(render, *arguments)
