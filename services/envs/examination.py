"""Tasks from a list or a file, an answer, and a verifier or a judge: what the environments have in common whose tasks
come from the run's config. Subclasses bring tools.

A task is {"prompt": …, "expected": …, "split": …}: the split is "train" unless it says otherwise, `expected` is what
the verifier compares with or the judge reads as a right answer, and a file holds one task in JSON on each line.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.envs import verifier as verifiers
from services.envs.environment import Message, Task, TimeStep
from services.envs.http_client import HttpClient
from services.envs.judge import Judge
from services.envs.tools import ToolEnvironment


class Examination(ToolEnvironment):
    """Answer tasks from a list; a model judges the answers, or a verifier."""

    def __init__(
        self,
        *,
        tasks: Sequence[Mapping[str, Any]] | str,
        verifier: str = "",
        judge: Mapping[str, Any] | None = None,
        turns: int | None = None,
        timeout_s: float = 15.0,
        attempts: int = 3,
        max_concurrent_requests: int = 32,
    ):
        """Raises ValueError for what makes no task.

        Args:
            tasks: the tasks, or the path of a file of them.
            verifier: its name; empty: "exact", unless there is a judge.
            judge: arguments of Judge; the reward is its judgement then.
            turns: actions, after which an episode without an answer is worth 0; empty: as many as the gateway allows.
            timeout_s: for one HTTP request, of a judge or a tool; for one search of a regex.
            attempts: at one such request.
            max_concurrent_requests: of all episodes of this server.
        """
        if verifier and judge is not None:
            raise ValueError("set verifier or judge: either decides the reward")
        if turns is not None and turns < 1:
            raise ValueError("turns must be 1 or more")
        self._tasks = _read(tasks) if isinstance(tasks, str) else _by_split(tasks)
        self.splits = {split: len(members) for split, members in self._tasks.items()}
        self.max_turns = turns
        self._judge = None if judge is None else Judge(**judge)
        self._verifier = verifier
        self._verify = verifiers.find(verifier or "exact")
        self._timeout_s = timeout_s
        if judge is None:
            for members in self._tasks.values():
                for task in members:
                    verifiers.check(verifier or "exact", task)
        self._make_client = functools.partial(
            HttpClient, max_concurrent=max_concurrent_requests, timeout_s=timeout_s, attempts=attempts
        )
        self._make_client()

    @contextlib.asynccontextmanager
    async def setup(self) -> AsyncIterator[Any]:
        async with self._make_client() as client:
            yield client

    async def start(self, task: Task, draw: random.Random) -> str:
        members = self._tasks[task.split]
        self._task = members[task.index % len(members)]
        return str(self._task["prompt"])

    async def answer(self, message: Message) -> TimeStep:
        return TimeStep(reward=await self._reward(message.content), terminated=True)

    async def _reward(self, answer: str) -> float:
        """Raises verifier.NoJudgement."""
        if self._judge is None and self._verifier == "regex":
            arguments = (answer, self._task["expected"])
            return float(await self.blocking(verifiers.matches, *arguments, timeout_s=self._timeout_s))
        if self._judge is None:
            return await self._verify(answer, self._task)
        expected = self._task.get("expected", "")
        reference = expected if isinstance(expected, str) else json.dumps(expected)
        return await self._judge.reward(self.shared, self._task["prompt"], answer, reference)


@functools.lru_cache(maxsize=8)
def _read(path: str) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"tasks: {path} cannot be read: {error}") from error
    try:
        return _by_split([json.loads(line) for line in lines if line.strip()])
    except json.JSONDecodeError as error:
        raise ValueError(f"tasks: a line of {path} is not JSON: {error.doc[:60]!r}") from error


def _by_split(tasks: Sequence[Mapping[str, Any]]) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    splits: dict[str, list[Mapping[str, Any]]] = {}
    for task in tasks:
        if not isinstance(task, Mapping) or not isinstance(task.get("prompt"), str) or not task["prompt"]:
            raise ValueError(f"tasks: each needs a text `prompt`, and {task!r} has none")
        splits.setdefault(str(task.get("split", "train")), []).append(task)
    if not splits:
        raise ValueError("tasks: there are none")
    return splits
