"""What runs code that a model wrote: one interface for every strength of isolation.

A sandbox belongs to one episode. It keeps the variables of the code that it runs and the files of one scratch
directory, and is gone with all processes and files when it closes. Whatever the model's code does is an Outcome; what
the sandbox itself gets wrong is a SandboxError, which costs the episode and never the policy.
"""

from __future__ import annotations

import abc
import contextlib
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIB = 1 << 20


class SandboxError(Exception):
    """The sandbox failed, not the code in it: an infrastructure failure."""


class Refused(Exception):
    """The scratch directory does not take files, which is the doing of what the model has put into it."""


class Ending(enum.Enum):
    """Why a run ended."""

    EXITED = "exited"
    """By itself: with a status, or by a signal that it got from its limits or itself."""
    DEADLINE = "deadline"
    """Killed, with everything that it had started, when its time was up."""
    OUTPUT = "output"
    """Killed for writing more than the limit."""
    SCRATCH = "scratch"
    """Killed for filling its scratch directory, which is emptied, where no file system refuses in time."""
    LOST = "lost"
    """The whole sandbox was killed for what the code took; it has ended for good, and nothing runs in it any more."""


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use. A limit that is hit is an observation of the model's, not an error."""

    memory_bytes: int = 256 * MIB
    """Address space of each process (of the container together; of Monty's heap)."""
    processes: int = 16
    """Processes and threads at once."""
    cpu_s: int = 60
    """CPU seconds of each process. Code that keeps its variables is one process for the whole episode."""
    scratch_bytes: int = 32 * MIB
    """Everything in the scratch directory together, and so each file."""
    scratch_files: int = 2048
    open_files: int = 64
    output_bytes: int = 64 << 10
    """Of each of stdout and stderr, in one run."""

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 1:
            raise ValueError("every limit of a sandbox must be at least 1")
        if self.memory_bytes < 32 * MIB:
            raise ValueError(f"memory_bytes is {self.memory_bytes}: below {32 * MIB} no interpreter starts")


@dataclass(frozen=True)
class Code:
    """Python source, run in the episode's interpreter: what it binds is there for the next code. See it by print."""

    source: str


@dataclass(frozen=True)
class Command:
    """A program with arguments, run in the scratch directory.

    Every process of the sandbox ends with it, the interpreter that keeps the variables of Code included.
    """

    argv: Sequence[str]
    stdin: bytes = b""


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    stdout: str
    stderr: str
    """Both cut at Limits.output_bytes; bytes that are no UTF-8 are replaced. An exception's traceback is in stderr."""
    exit_status: int | None
    """0 when all went well; 1 after an exception; -N after signal N; None when it was killed by the sandbox."""
    ending: Ending = Ending.EXITED
    state_lost: bool = False
    """Whether the interpreter died, so that the next Code starts without variables."""

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with status 0."""
        return self.ending is Ending.EXITED and self.exit_status == 0


class Sandbox(abc.ABC):
    """One episode's sandbox. No two calls overlap."""

    @abc.abstractmethod
    async def run(self, program: Code | Command, *, deadline_s: float) -> Outcome:
        """Runs a program to its end, its deadline or its output limit. Raises SandboxError."""

    @abc.abstractmethod
    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Writes files, by paths relative to the scratch directory, in place of what is there.

        Raises ValueError for a path that is not inside, Refused, SandboxError.
        """

    @abc.abstractmethod
    async def read_files(self) -> dict[str, bytes]:
        """Every regular file of the scratch directory by its relative path; links are left out. Raises SandboxError."""


class Sandboxes(abc.ABC):
    """Opens sandboxes of one strength. At most `max_open` are open at once; who wants another waits."""

    @abc.abstractmethod
    def open(self) -> contextlib.AbstractAsyncContextManager[Sandbox]:
        """A sandbox, closed with the context. Raises SandboxError."""
