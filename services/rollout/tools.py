"""Assistant text to an action: its content, its tool calls, and what was wrong with those that could not be read.

Pure. What the policy writes is never an error here: a call that cannot be read becomes a line of
`malformed_tool_calls`, which the environment answers, so that the policy can learn from it.

The grammar is that of Hermes and Qwen:  <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>  any number of
times, with text before, between and after.
"""

from __future__ import annotations

import json
from typing import Any, Literal, NoReturn

from headrace.v1 import environment_service_pb2 as environment_pb
from headrace.v1 import trajectory_pb2 as pb

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Bounds the time that a hostile message takes, and the size of the answer to it.
MAX_CALLS = 64
MAX_LINE_CHARACTERS = 200


def parse(text: str, parser: Literal["none", "hermes"]) -> environment_pb.Action:
    """The action of an assistant's text.

    With "none" the whole text is content. With "hermes" content is what stands outside the calls, stripped; calls are
    named call_0, call_1, … in order.
    """
    # A lone surrogate is no character and cannot be sent.
    text = text.encode("utf-8", "replace").decode()
    if parser == "none":
        return environment_pb.Action(message=pb.Message(role="assistant", content=text))
    outside: list[str] = []
    calls: list[pb.ToolCall] = []
    malformed: list[str] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        outside.append(text[position:start])
        body = start + len(OPEN)
        if len(calls) + len(malformed) == MAX_CALLS:
            malformed.append(f"more than {MAX_CALLS} tool calls in one message; the rest is ignored")
            position = len(text)
            break
        try:
            name, arguments_json, position = _read_call(text, body)
            calls.append(pb.ToolCall(id=f"call_{len(calls)}", name=name, arguments_json=arguments_json))
        except (ValueError, RecursionError) as error:
            end = text.find(CLOSE, body)
            malformed.append(_line(error, text[body:end] if end >= 0 else text[body:]))
            position = end + len(CLOSE) if end >= 0 else len(text)
    outside.append(text[position:])
    message = pb.Message(role="assistant", content="".join(outside).strip(), tool_calls=calls)
    return environment_pb.Action(message=message, malformed_tool_calls=malformed)


def _read_call(text: str, start: int) -> tuple[str, str, int]:
    """Name, arguments as JSON, and where the text goes on, of the call whose body starts at `start`.

    Raises ValueError or RecursionError when it is none. The JSON is read up to its own end, so that a closing tag
    within a string closes nothing.
    """
    while start < len(text) and text[start].isspace():
        start += 1
    value, end = _DECODER.raw_decode(text, start)
    while end < len(text) and text[end].isspace():
        end += 1
    if not text.startswith(CLOSE, end):
        raise ValueError(f"no {CLOSE} after the JSON object")
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError('"name" must be a string')
    name.encode()  # a lone surrogate, which JSON can escape, raises UnicodeEncodeError, a ValueError
    if not isinstance(arguments, dict):
        raise ValueError('"arguments" must be an object')
    return name, _to_json(arguments), end + len(CLOSE)


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
    elif isinstance(error, RecursionError):
        reason = "nested too deeply"
    else:
        reason = str(error)
    return " ".join(f"{reason}: {body[:MAX_LINE_CHARACTERS]}".split())[:MAX_LINE_CHARACTERS]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
