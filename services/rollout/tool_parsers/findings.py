"""What a grammar finds in an assistant's text: the text outside calls, the calls, and what was wrong with the others.

A grammar is a function from a text and its `Findings`, which it fills from left to right. What the policy writes is
never an error: what a grammar raises while it reads one call becomes a line of `malformed`.
"""

from __future__ import annotations

import json
from typing import Any

from headrace.v1 import trajectory_pb2 as pb

# Bounds the time that a hostile message takes, and the size of the answer to it.
MAX_CALLS = 64
MAX_LINE_CHARACTERS = 200

# What reading a call may raise: of JSON, of Python's own parser, and of text that is too deep for either.
UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)


class Findings:
    """Filled by a grammar. `types` tells the JSON type that a tool declares for an argument, "" where it tells none."""

    def __init__(self, types: dict[str, dict[str, str]]):
        self.outside: list[str] = []
        self.calls: list[pb.ToolCall] = []
        self.malformed: list[str] = []
        self._types = types

    @property
    def full(self) -> bool:
        """Whether the message holds as many calls as are read. Adds the line that says so."""
        if len(self.calls) + len(self.malformed) < MAX_CALLS:
            return False
        self.malformed.append(f"more than {MAX_CALLS} tool calls in one message; the rest is ignored")
        return True

    def type_of(self, tool: str, argument: str) -> str:
        """The declared JSON type, "" if none is."""
        return self._types.get(tool, {}).get(argument, "")

    def add(self, name: object, arguments: object, *, arguments_name: str = "arguments") -> None:
        """A call. Raises one of UNREADABLE where it is none."""
        if not isinstance(name, str) or not name:
            raise ValueError('"name" must be a string')
        name.encode()  # a lone surrogate, which JSON can escape, raises UnicodeEncodeError, a ValueError
        if not isinstance(arguments, dict):
            raise ValueError(f'"{arguments_name}" must be an object')
        self.calls.append(pb.ToolCall(id=f"call_{len(self.calls)}", name=name, arguments_json=_to_json(arguments)))

    def complain(self, error: Exception, body: str) -> None:
        """A call that could not be read, for this reason."""
        self.malformed.append(_line(error, body))


def _to_json(arguments: dict[str, Any]) -> str:
    readable = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        readable.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments, allow_nan=False)
    return readable


def _line(error: Exception, body: str) -> str:
    if isinstance(error, json.JSONDecodeError):
        reason = f"not JSON ({error.msg})"
    elif isinstance(error, UnicodeEncodeError):
        reason = '"name" is no text'
    elif isinstance(error, SyntaxError):
        reason = f"not Python ({error.msg})"
    elif isinstance(error, RecursionError | MemoryError):
        reason = "nested too deeply"
    else:
        reason = str(error)
    return " ".join(f"{reason}: {body[:MAX_LINE_CHARACTERS]}".split())[:MAX_LINE_CHARACTERS]
