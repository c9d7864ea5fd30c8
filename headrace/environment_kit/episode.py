"""A client of one episode that writes down what it did, so that a broken rule comes with its reproduction."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio
from google.protobuf import text_format

from headrace.v1 import environment_service_pb2 as pb
from headrace.v1.trajectory_pb2 import PURPOSE_TRAINING, Message, Task, ToolCall

_LONGEST_LINE = 400


class Broken(Exception):
    """The server broke a rule; the message says how."""

    def __init__(self, reason: str, *episodes: Episode):
        """`episodes` are those that show it."""
        super().__init__(reason)
        self.episodes = episodes


class Refused(Broken):
    """The server ended the stream with an error where an answer was due."""

    def __init__(self, code: grpc.StatusCode, details: str, episode: Episode):
        self.code, self.details = code, details
        super().__init__(f"the stream ended with {code.name}{f' ({details})' if details else ''}", episode)


class Episode:
    """One Interact stream."""

    def __init__(self, stub: Any, *, timeout_s: float):
        """Opens the stream; each answer may take `timeout_s` seconds."""
        self._said: list[tuple[str, Any]] = []
        self._timeout_s = timeout_s
        self._call = stub.Interact()

    @property
    def log(self) -> list[str]:
        """What was sent (>) and came back (<). Written when it is read: it takes longer than a fast server's answer."""
        return [f"{mark} {said if isinstance(said, str) else shown(said)}" for mark, said in self._said]

    async def send(self, request: pb.InteractRequest) -> pb.InteractResponse:
        """The next response after sending the request. Raises Refused, and Broken when none comes."""
        self._said.append((">", request))
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._call.write(request)
                response = await self._call.read()
        except TimeoutError:
            self._said.append(("<", f"nothing within {self._timeout_s:g} s"))
            raise Broken(f"no response within {self._timeout_s:g} s", self) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await self._refused() from None
        except asyncio.CancelledError:
            if _is_ours():
                raise
            raise await self._refused() from None
        if response is grpc.aio.EOF:
            raise await self._refused()
        self._said.append(("<", response))
        return response

    async def end(self) -> None:
        """Half-closes. Raises Broken unless the stream ends then, with OK and without another response."""
        self._said.append((">", "half-close"))
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._call.done_writing()
                extra = await self._call.read()
                code = await self._call.code() if extra is grpc.aio.EOF else None
        except TimeoutError:
            raise Broken(f"the stream stays open {self._timeout_s:g} s after the client's end of it", self) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await self._refused() from None
        except asyncio.CancelledError:
            if _is_ours():
                raise
            raise await self._refused() from None
        if code is None:
            self._said.append(("<", extra))
            raise Broken("a response came that no request asked for", self)
        if code != grpc.StatusCode.OK:
            raise await self._refused()

    def cancel(self) -> None:
        """Breaks the stream off."""
        self._said.append((">", "cancel"))
        self._call.cancel()

    async def _refused(self) -> Refused:
        refused = Refused(await self._call.code(), await self._call.details() or "", self)
        self._said.append(("<", f"{refused.code.name}: {refused.details}"))
        return refused


def _is_ours() -> bool:
    """Whether a CancelledError cancels this task; the library raises it also for a stream that is cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def reset(task: Task) -> pb.InteractRequest:
    """A stream's first request."""
    return pb.InteractRequest(reset=task)


def act(content: str = "", *, tool_calls: Iterable[ToolCall] = (), malformed: Iterable[str] = ()) -> pb.InteractRequest:
    """An assistant message, as the policy's action."""
    return act_as(Message(role="assistant", content=content, tool_calls=tool_calls), malformed=malformed)


def act_as(message: Message, *, malformed: Iterable[str] = ()) -> pb.InteractRequest:
    """The message as the policy's action."""
    return pb.InteractRequest(action=pb.Action(message=message, malformed_tool_calls=malformed))


def task(environment: str, split: str, **fields: Any) -> Task:
    """A task for training."""
    return Task(**{"environment": environment, "split": split, "purpose": PURPOSE_TRAINING, **fields})


def shown(message: Any) -> str:
    """A record in protobuf's text format, in one line, cut where it is long."""
    text = text_format.MessageToString(message, as_one_line=True, as_utf8=True)
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}… ({len(text)} characters)"
