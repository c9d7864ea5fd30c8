"""The trajectory in the making: what happened, where the time went, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from headrace.trajectory import FLOAT32, INT32, to_bytes, total_reward
from headrace.v1 import environment_service_pb2 as environment_pb
from headrace.v1 import trajectory_pb2 as pb
from services.rollout import metrics
from services.rollout.inference import Sample
from services.rollout.policy import Actor


class Outcome(NamedTuple):
    """How an episode ended, and for what is no plain end a line about it."""

    status: pb.EpisodeStatus
    detail: str = ""
    cause: str = ""  # of an error, in one word


class Record:
    """The trajectory in the making, and where its time goes."""

    def __init__(self, task: pb.Task, trajectory_id: str, *, queued_s: float):
        self.trajectory = pb.Trajectory(trajectory_id=trajectory_id)
        self.started_s = self._now_s()
        self.trouble = ""  # what the last failed session, if any, failed of
        self.cause = ""  # the same in one word
        self.outcome: Outcome | None = None  # once the episode has ended; its session may still be closing
        self._environment = task.environment
        self._actor: Actor | None = None
        self._prompted = False
        self._timings = self.trajectory.timings
        self._timings.queue_s = self.started_s - queued_s

    @property
    def trajectory_id(self) -> str:
        return self.trajectory.trajectory_id

    @property
    def attempts(self) -> int:
        """Sessions so far."""
        return self.trajectory.attempts

    @property
    def turn_count(self) -> int:
        """Turns of this session so far."""
        return len(self.trajectory.turns)

    def restart(self, actor: Actor) -> None:
        """A new session begins: forgets a failed one's steps; its time stays counted."""
        trajectory = self.trajectory
        trajectory.attempts += 1
        del trajectory.turns[:], trajectory.messages[:]
        trajectory.metrics.clear()
        self._actor = actor
        self._prompted = False

    def retract(self, trouble: str) -> None:
        """The session found no place; it was no attempt."""
        self.trouble, self.cause = trouble, "busy"
        self.trajectory.attempts -= 1

    def begin(self, step: environment_pb.InteractResponse) -> None:
        """The environment took the episode on."""
        self._prompted = True
        self._note(step)

    def add_turn(self, observation: np.ndarray, sample: Sample) -> None:
        turn = self.trajectory.turns.add(
            observation_token_ids=to_bytes(observation, INT32),
            action_token_ids=to_bytes(sample.token_ids, INT32),
            action_logprobs=to_bytes(sample.logprobs, FLOAT32),
            finish_reason=sample.finish_reason,
        )
        for version, length in sample.version_spans:
            turn.version_spans.add(policy_version=version, length=length)

    def add_step(self, action: environment_pb.Action, step: environment_pb.InteractResponse) -> None:
        self.trajectory.messages.append(action.message)
        if step.HasField("reward"):
            self.trajectory.turns[-1].reward = step.reward
        self._note(step)

    def _note(self, step: environment_pb.InteractResponse) -> None:
        self.trajectory.messages.extend(step.messages)
        for name, value in step.metrics.items():
            self.trajectory.metrics[name] = value

    @contextlib.contextmanager
    def environment_time(self) -> Iterator[None]:
        """What the body takes is time of the environment."""
        start_s = self._now_s()
        try:
            yield
        finally:
            self._timings.environment_s += self._now_s() - start_s

    @contextlib.contextmanager
    def engine_time(self) -> Iterator[None]:
        """What the body takes is time of the engines."""
        start_s = self._now_s()
        try:
            yield
        finally:
            self._timings.engine_s += self._now_s() - start_s

    def out_of_time(self) -> Outcome:
        """The outcome when episode_timeout_s passes: a limit's, unless something had failed by then."""
        if self._actor is not None and self._actor.trouble:
            return Outcome(pb.EPISODE_STATUS_ENGINE_ERROR, f"episode_timeout_s passed; {self._actor.trouble}", "engine")
        if not self._prompted:
            trouble = self.trouble or "the environment did not reset"
            return Outcome(
                pb.EPISODE_STATUS_ENVIRONMENT_ERROR, f"episode_timeout_s passed; {trouble}", self.cause or "deadline"
            )
        return Outcome(pb.EPISODE_STATUS_TRUNCATED_TIME)

    def end(self, outcome: Outcome) -> pb.Trajectory:
        """The trajectory, complete and counted."""
        trajectory, timings = self.trajectory, self._timings
        trajectory.status = outcome.status
        trajectory.status_detail = outcome.detail
        trajectory.cause = outcome.cause
        trajectory.terminated = outcome.status == pb.EPISODE_STATUS_COMPLETED
        trajectory.truncated = outcome.status in _TRUNCATED
        timings.total_s = self._now_s() - self.started_s
        metrics.ended_episodes.labels(self._environment, status_name(outcome.status)).inc()
        if outcome.cause:
            metrics.failed_episodes.labels(self._environment, outcome.cause).inc()
        if trajectory.truncated and total_reward(trajectory) is None:
            metrics.unrewarded_episodes.labels(self._environment).inc()
        for phase, seconds in (
            ("queue", timings.queue_s),
            ("engine", timings.engine_s),
            ("environment", timings.environment_s),
            ("total", timings.total_s),
        ):
            metrics.episode_seconds.labels(self._environment, phase).observe(seconds)
        return trajectory

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


_TRUNCATED = frozenset(
    {
        pb.EPISODE_STATUS_TRUNCATED_TURNS,
        pb.EPISODE_STATUS_TRUNCATED_TOKENS,
        pb.EPISODE_STATUS_TRUNCATED_TIME,
    }
)


def status_name(status: pb.EpisodeStatus) -> str:
    """Name of a status for people and metrics, for example "completed"."""
    return pb.EpisodeStatus.Name(status).removeprefix("EPISODE_STATUS_").lower()
