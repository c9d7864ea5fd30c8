"""Software engineering in small: a repository with a bug, an issue that tells of it, and checks that nobody sees.

The tasks are files of swe_lite_tasks. Each holds a tree, an issue, a fix, and checks: code that computes a value from
the repository's own functions, and the value that it must have. To grade, the tree as the policy leaves it and the
checks' code go into a fresh sandbox, and only values come out; what they should be stays here, where they are
compared. So nothing that the policy writes, whatever runs when it is imported, can make a wrong value pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import random
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.envs.environment import Action, Message, Task, TimeStep, ToolCall, assistant
from services.envs.sandbox import choice
from services.envs.sandbox.hazards import Strength
from services.envs.sandbox.sandbox import Command, Ending, Refused, Sandbox
from services.envs.sandbox.supervised import is_inside
from services.envs.tools import ToolEnvironment, ToolError, tool

TASKS = Path(__file__).with_name("swe_lite_tasks")
# One task in so many is kept for the split "test".
TEST_SHARE = 4
MOST_CHARACTERS = 8000

PROMPT = """Fix the bug that this issue of the repository reports. Tests that you cannot see decide whether it is fixed.

{issue}
Files, all of them beneath the working directory:
{files}

Call submit when you are done."""

# Runs inside the sandbox: the checks' code comes on stdin, what it computed goes out. What the repository prints itself
# goes to stderr, so that innocent output is in nobody's way.
RUNNER = """
import json, os, sys
answers = os.dup(1)
os.dup2(2, 1)
sources = json.loads(sys.stdin.read())
sys.path.insert(0, os.getcwd())
found = []
for source in sources:
    names = {"__name__": "check"}
    try:
        exec(source, names)
        found.append(json.loads(json.dumps({"result": names["result"]})))
    except BaseException as error:
        found.append({"raises": type(error).__name__})
os.write(answers, json.dumps(found).encode())
os._exit(0)
"""


@dataclasses.dataclass(frozen=True)
class Repository:
    """A task."""

    name: str
    issue: str
    files: Mapping[str, str]
    fix: Mapping[str, str]
    """The files that a correct change replaces."""
    checks: Sequence[tuple[str, Any]]
    """Code that sets `result`, and {"result": value} or {"raises": name of the exception}."""


class SweLite(ToolEnvironment):
    """Fix a bug in a small Python repository with a shell and an editor; hidden checks decide.

    Reward 1 if every check passes, else 0. The tree is graded when the policy submits, answers without calls, or has
    used up its turns.
    """

    metric_names = ("checks_passed",)

    def __init__(
        self,
        *,
        tasks: Sequence[str] = (),
        turns: int = 20,
        command_deadline_s: float = 20.0,
        grading_deadline_s: float = 30.0,
        sandbox: Mapping[str, Any] | None = None,
    ):
        """Verifies the sandbox's isolation when the first one is made.

        Args:
            tasks: names of tasks; none: all of them.
            turns: actions until the tree is graded as it is.
            command_deadline_s: what one shell command may take.
            grading_deadline_s: what all checks may take together.
            sandbox: see services.envs.sandbox.choice.Choice; Monty, which runs no commands, does not serve.

        Raises ValueError or TypeError for options that make no task, StartupError.
        """
        known = repositories()
        unknown = set(tasks) - set(known)
        if unknown:
            raise ValueError(f"no tasks {sorted(unknown)}, but {', '.join(known)}")
        if turns < 1 or min(command_deadline_s, grading_deadline_s) <= 0:
            raise ValueError("turns must be at least 1, the deadlines above 0")
        chosen = choice.Choice.parse(sandbox or {})
        if chosen.strength is Strength.MONTY:
            raise ValueError("sandbox.strength must be process or container: Monty runs no commands")
        names = sorted(tasks or known)
        by_split = {"test": names[::TEST_SHARE], "train": [n for i, n in enumerate(names) if i % TEST_SHARE]}
        self._names = {split: kept for split, kept in by_split.items() if kept}
        self.splits = {split: len(kept) for split, kept in self._names.items()}
        self.max_turns = turns
        self._command_deadline_s, self._grading_deadline_s = command_deadline_s, grading_deadline_s
        self._sandboxes = choice.verified(chosen)
        self._opened = contextlib.AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._working = asyncio.Lock()
        self._passed: float | None = None
        self._demonstrated = False

    async def start(self, task: Task, draw: random.Random) -> str:
        names = self._names[task.split]
        self._repository = repositories()[names[task.index % len(names)]]
        files = "\n".join(sorted(self._repository.files))
        return PROMPT.format(issue=self._repository.issue, files=files)

    @tool
    async def shell(self, command: str) -> str:
        """Runs a command of the shell (sh) in the repository; returns what it prints and its exit status.

        Args:
            command: for example grep -rn total . or python3 -m unittest
        """
        async with self._working:
            sandbox = await self._own_sandbox()
            program = Command(["sh", "-c", command])
            outcome = await sandbox.run(program, deadline_s=self._command_deadline_s)
        status = {
            Ending.EXITED: f"exit status {outcome.exit_status}",
            Ending.DEADLINE: f"stopped after {self._command_deadline_s:g} s",
            Ending.OUTPUT: "stopped: it printed too much",
            Ending.SCRATCH: "stopped: it wrote too much, and all files are gone",
            Ending.LOST: "the sandbox was stopped for what a command took, and is gone",
        }[outcome.ending]
        return f"{_clipped(outcome.stdout + outcome.stderr)}[{status}]"

    @tool
    async def read_file(self, path: str) -> str:
        """Returns the content of a file.

        Args:
            path: relative to the repository
        """
        async with self._working:
            return _clipped(await self._content(path))

    @tool
    async def write_file(self, path: str, content: str) -> str:
        """Writes a whole file, new or in place of the old one.

        Args:
            path: relative to the repository
            content: all of the file
        """
        async with self._working:
            await self._write(path, content)
        return f"wrote {path}"

    @tool
    async def edit_file(self, path: str, old: str, new: str) -> str:
        """Replaces a piece of a file, which must occur in it exactly once.

        Args:
            path: relative to the repository
            old: the piece, with its white space
            new: what takes its place
        """
        async with self._working:
            content = await self._content(path)
            if content.count(old) != 1 or not old:
                raise ToolError(f"the piece occurs {content.count(old) if old else 0} times in {path}, not once")
            await self._write(path, content.replace(old, new))
        return f"edited {path}"

    @tool
    async def submit(self) -> str:
        """Hands the repository in as it is, and ends the work."""
        async with self._working:
            self.finish(await self._grade())
        return "submitted"

    async def answer(self, message: Message) -> TimeStep:
        return TimeStep(reward=await self._grade(), terminated=True)

    async def out_of_turns(self) -> TimeStep:
        return TimeStep(reward=await self._grade(), terminated=True)

    async def step(self, action: Action) -> TimeStep:
        step = await super().step(action)
        if self._passed is None:
            return step
        return dataclasses.replace(step, metrics={**step.metrics, "checks_passed": self._passed})

    async def demonstrate(self) -> Message:
        """Writes the files of the fix, then submits."""
        if self._demonstrated:
            return assistant("", ToolCall(id="call_0", name="submit", arguments_json="{}"))
        self._demonstrated = True
        calls = [
            ToolCall(
                id=f"call_{number}",
                name="write_file",
                arguments_json=json.dumps({"path": path, "content": content}),
            )
            for number, (path, content) in enumerate(self._repository.fix.items())
        ]
        return assistant("", *calls)

    async def close(self) -> None:
        await self._opened.aclose()

    async def _own_sandbox(self) -> Sandbox:
        if self._passed is not None:
            raise ToolError("the repository is handed in")
        if self._sandbox is None:
            self._sandbox = await self._opened.enter_async_context(self._sandboxes.open())
            await self._sandbox.write_files(_encoded(self._repository.files))
        return self._sandbox

    async def _content(self, path: str) -> str:
        files = await (await self._own_sandbox()).read_files()
        if path not in files:
            raise ToolError(f"no file {path!r}, but {', '.join(sorted(files))[:500]}")
        return files[path].decode("utf-8", "replace")

    async def _write(self, path: str, content: str) -> None:
        sandbox = await self._own_sandbox()
        try:
            await sandbox.write_files({path: content.encode("utf-8", "replace")})
        except (Refused, ValueError) as error:
            raise ToolError(f"cannot write {path!r}: {error}") from error

    async def _grade(self) -> float:
        """The reward of the tree as it is. Raises SandboxError."""
        if self._passed is None:
            tree = _encoded(self._repository.files)
            if self._sandbox is not None:
                tree = await self._sandbox.read_files()
                self._sandbox = None
                # Closed first: an episode that holds one and waits for another would wait for itself.
                await self._opened.aclose()
            self._passed = await self._passing(tree)
        return float(self._passed == 1.0)

    async def _passing(self, tree: Mapping[str, bytes]) -> float:
        """The share of checks that a tree passes, in a sandbox of its own."""
        checks = self._repository.checks
        sources = json.dumps([source for source, _ in checks]).encode()
        async with self._sandboxes.open() as sandbox:
            try:
                await sandbox.write_files({path: data for path, data in tree.items() if is_inside(path)})
            except Refused:
                return 0.0
            runner = Command(["python3", "-I", "-S", "-c", RUNNER], sources)
            outcome = await sandbox.run(runner, deadline_s=self._grading_deadline_s)
        try:
            found = json.loads(outcome.stdout)
        except (ValueError, RecursionError):
            return 0.0
        if not isinstance(found, list) or len(found) != len(checks):
            return 0.0
        return sum(_same(got, wanted) for got, (_, wanted) in zip(found, checks, strict=True)) / len(checks)


@functools.cache
def repositories() -> dict[str, Repository]:
    """All tasks by name, in order of their names. Raises ValueError for a file that is none."""
    found = {}
    for path in sorted(TASKS.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        checks = [
            (check["code"], {kind: check[kind] for kind in ("result", "raises") if kind in check})
            for check in content["checks"]
        ]
        found[path.stem] = Repository(path.stem, content["issue"], content["files"], content["fix"], checks)
    return found


def _same(got: Any, wanted: Any) -> bool:
    """Whether two values are the same JSON: 1, 1.0 and true are three values."""
    return json.dumps(got, sort_keys=True) == json.dumps(wanted, sort_keys=True)


def _encoded(files: Mapping[str, str]) -> dict[str, bytes]:
    return {path: content.encode() for path, content in files.items()}


def _clipped(text: str) -> str:
    """The text, without its middle when it is long."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
