"""A sandbox whose first process is supervisor.py, reached over two streams of bytes: what `process` and `container`
have in common. The supervisor keeps deadlines; one that does not answer soon after them is given up.
"""

from __future__ import annotations

import asyncio
import base64
import json
import posixpath
import struct
from collections.abc import Mapping
from typing import Any, Protocol

from services.envs.sandbox.sandbox import Code, Command, Ending, Limits, Outcome, Refused, Sandbox, SandboxError

# What a busy machine may take to kill and report, or to move files.
GRACE_S = 60.0


class Lost(Exception):
    """The supervisor is there no more."""


class Streams(Protocol):
    """Where the supervisor is heard and spoken to."""

    async def killed_for_limits(self) -> bool:
        """After the supervisor's end: whether it was killed for what the code took, so that nothing has failed."""

    async def read(self, size: int) -> bytes:
        """Exactly `size` bytes. Raises EOFError, OSError."""

    async def write(self, data: bytes) -> None:
        """Raises OSError."""


class Supervised(Sandbox):
    """A sandbox as its supervisor reports it."""

    def __init__(self, streams: Streams, limits: Limits):
        self._streams = streams
        self._limits = limits
        self._lost = False

    async def start(self) -> None:
        """Waits for the supervisor. Raises SandboxError with what it cannot do here."""
        try:
            await self._answer(GRACE_S)
        except Lost as lost:
            raise SandboxError(str(lost)) from lost

    async def run(self, program: Code | Command, *, deadline_s: float) -> Outcome:
        request: dict[str, Any] = {"deadline_s": deadline_s}
        if isinstance(program, Code):
            source = program.source.encode("utf-8", "surrogatepass")
            request |= {"operation": "code", "source": _text(source)}
        else:
            request |= {"operation": "command", "argv": list(program.argv), "stdin": _text(program.stdin)}
        answer = await self._ask(request, deadline_s + GRACE_S)
        if answer is None:
            return Outcome("", "", None, Ending.LOST, state_lost=True)
        try:
            return Outcome(
                stdout=_bytes(answer["stdout"]).decode("utf-8", "replace"),
                stderr=_bytes(answer["stderr"]).decode("utf-8", "replace"),
                exit_status=answer["status"],
                ending=Ending(answer["ending"]),
                state_lost=answer["state_lost"],
            )
        except (KeyError, ValueError) as error:
            raise SandboxError(f"the sandbox answered what is no outcome ({error!r})") from error

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        for path in files:
            if not is_inside(path):
                raise ValueError(f"{path!r} is no relative path inside the scratch directory")
        texts = {path: _text(data) for path, data in files.items()}
        answer = await self._ask({"operation": "write", "files": texts}, GRACE_S)
        if answer is None:
            raise Refused("the sandbox has ended")
        if "refused" in answer:
            raise Refused(str(answer["refused"]))

    async def read_files(self) -> dict[str, bytes]:
        answer = await self._ask({"operation": "read"}, GRACE_S)
        if answer is None:
            return {}
        return {path: _bytes(content) for path, content in answer["files"].items()}

    async def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """The answer; None when the sandbox was killed for what the code took. Raises SandboxError."""
        if self._lost:
            return None
        body = json.dumps(request).encode()
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._streams.write(struct.pack("!I", len(body)) + body)
            except (OSError, TimeoutError) as error:
                raise Lost(f"the sandbox takes no request: {error!r}") from error
            return await self._answer(timeout_s)
        except Lost as lost:
            self._lost = await self._streams.killed_for_limits()
            if not self._lost:
                raise SandboxError(str(lost)) from lost
            return None

    async def _answer(self, timeout_s: float) -> dict[str, Any]:
        limit = 4 * self._limits.scratch_bytes + 16 * self._limits.output_bytes + (1 << 20)
        try:
            async with asyncio.timeout(timeout_s):
                (size,) = struct.unpack("!I", await self._streams.read(4))
                if size > limit:
                    raise SandboxError(f"the sandbox answered with {size} bytes")
                answer = json.loads(await self._streams.read(size))
        except (TimeoutError, ValueError) as error:
            raise SandboxError(f"the sandbox does not answer: {error!r}") from error
        except (OSError, EOFError) as error:
            raise Lost(f"the sandbox does not answer: {error!r}") from error
        if not isinstance(answer, dict):
            raise SandboxError("the sandbox answered what is no object")
        if "error" in answer:
            raise SandboxError(str(answer["error"])[:1000])
        return answer


def is_inside(path: str) -> bool:
    """Whether a relative path names something inside its directory, whatever lies there."""
    parts = path.split("/")
    return bool(path) and "\0" not in path and path == posixpath.normpath(path) and parts[0] not in ("", "..", ".")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
