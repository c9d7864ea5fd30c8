"""Who acts in an episode: the policy that the engines hold, or the environment's expert.

Both keep count of the episode's tokens. An action leaves as a `Sample`; an expert's has no logprobs and no versions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from headrace.v1 import environment_service_pb2 as environment_pb
from headrace.v1 import trajectory_pb2 as pb
from services.rollout.inference import Context, Engines, Sample
from services.rollout.renderer import Renderer


class Actor(Protocol):
    """Acts in one episode."""

    @property
    def length(self) -> int:
        """Tokens of the episode so far, actions included."""

    @property
    def trouble(self) -> str:
        """Why it has not acted yet, where something is wrong."""

    def observe(self, token_ids: np.ndarray) -> None:
        """Adds int32[O] observed tokens."""

    async def act(self, step: environment_pb.InteractResponse, max_tokens: int) -> Sample | None:
        """An action of at most max_tokens tokens, or None if it needs more. Raises EngineError."""


@contextlib.contextmanager
def acting(task: pb.Task, name: str, *, engines: Engines, renderer: Renderer, temperature: float) -> Iterator[Actor]:
    """The actor of one session of the task; `name` is unique among all requests to the engines."""
    if task.purpose == pb.PURPOSE_DEMONSTRATION:
        yield _Expert(renderer)
        return
    with engines.context(
        name,
        temperature=temperature,
        stop_token_ids=renderer.stop_token_ids,
        min_policy_version=task.min_policy_version,
        group=task.task_id,
    ) as context:
        yield _Policy(context)


class _Policy:
    """Samples from the engines."""

    def __init__(self, context: Context):
        self._context = context

    @property
    def length(self) -> int:
        return self._context.length

    @property
    def trouble(self) -> str:
        return self._context.trouble

    def observe(self, token_ids: np.ndarray) -> None:
        self._context.append(token_ids.tolist())

    async def act(self, step: environment_pb.InteractResponse, max_tokens: int) -> Sample | None:
        return await self._context.sample(max_tokens)


class _Expert:
    """Says what the environment demonstrates, in the ids that the chat template gives an assistant message."""

    def __init__(self, renderer: Renderer):
        self.length = 0
        self.trouble = ""
        self._renderer = renderer

    def observe(self, token_ids: np.ndarray) -> None:
        self.length += len(token_ids)

    async def act(self, step: environment_pb.InteractResponse, max_tokens: int) -> Sample | None:
        ids = self._renderer.action(step.demonstration).tolist()
        self.length += len(ids)
        return Sample(ids, [], [], pb.FINISH_REASON_STOP) if len(ids) <= max_tokens else None
