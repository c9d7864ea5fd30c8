"""OpenAI's chat completions: request bodies to messages and tools, completions to replies. Pure.

Sampling is the run's own, or the log-probabilities would be of another distribution than the one that is trained: what
a request says about it is ignored, and named in the reply's header. What would change the answer's form is refused.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from typing import Any

from headrace import images
from headrace.v1 import environment_service_pb2 as environment_pb
from headrace.v1 import trajectory_pb2 as pb
from services.rollout.sessions import Completion

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_IGNORED = (
    *("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "reasoning_effort", "logprobs", "top_logprobs"),
)
_REFUSED = {
    "n": (None, 1),
    "stop": (None, []),
    "tool_choice": (None, "auto"),
    "response_format": (None, {"type": "text"}),
    "functions": (None, []),
    "audio": (None,),
}


class BadRequest(ValueError):
    """A body that is no request, in one line."""


def read(body: Any) -> tuple[list[pb.Message], list[environment_pb.Tool], list[str]]:
    """Messages, tools, and the names of the settings that are ignored. Raises BadRequest."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise BadRequest("messages must be a list with at least one message")
    for name, allowed in _REFUSED.items():
        if body.get(name) not in allowed:
            raise BadRequest(f"{name} cannot be chosen here: leave it out")
    try:
        messages = [_message(entry) for entry in body["messages"]]
        tools = [_tool(entry) for entry in body.get("tools") or []]
    except (KeyError, TypeError, AttributeError, UnicodeEncodeError) as error:
        raise BadRequest(
            f"messages or tools have a field of the wrong form ({type(error).__name__}: {error})"
        ) from error
    return messages, tools, [name for name in _IGNORED if body.get(name) is not None]


def reply(completion: Completion, *, reply_id: str, created: int, model: str) -> dict[str, Any]:
    """The body of a reply."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", **_answer(completion.message)},
        "finish_reason": completion.finish_reason,
        "logprobs": None,
    }
    return {
        "id": reply_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": _usage(completion),
    }


def chunks(
    completion: Completion, *, reply_id: str, created: int, model: str, include_usage: bool
) -> Iterator[dict[str, Any]]:
    """The events of a streamed reply."""

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {**head, "choices": [choice]}

    head = {"id": reply_id, "object": "chat.completion.chunk", "created": created, "model": model}
    answer = _answer(completion.message)
    yield chunk({"role": "assistant", "content": answer["content"]})
    for index, call in enumerate(answer.get("tool_calls", [])):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, completion.finish_reason)
    if include_usage:
        yield {**head, "choices": [], "usage": _usage(completion)}


def _answer(message: pb.Message) -> dict[str, Any]:
    answer: dict[str, Any] = {"content": message.content}
    if message.thinking:
        answer["reasoning_content"] = message.thinking
    if message.tool_calls:
        answer["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in message.tool_calls
        ]
    return answer


def _usage(completion: Completion) -> dict[str, int]:
    prompt, answer = completion.prompt_tokens, completion.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _message(entry: dict[str, Any]) -> pb.Message:
    if entry["role"] not in _ROLES:
        raise BadRequest(f"role {entry['role']!r} is not one of {sorted(_ROLES)}")
    message = pb.Message(role=_ROLES[entry["role"]], tool_call_id=entry.get("tool_call_id") or "")
    content = entry.get("content") or []
    parts: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts:
        if part["type"] == "text":
            message.content += part["text"]
        elif part["type"] == "image_url":
            message.images.append(_image(part["image_url"]["url"]))
        else:
            raise BadRequest(f"content of the type {part['type']!r} cannot be read: send text")
    for call in entry.get("tool_calls") or []:
        function = call["function"]
        if not isinstance(_json(function["arguments"]), dict):
            raise BadRequest("a tool call's arguments must be a JSON object")
        message.tool_calls.add(id=call["id"], name=function["name"], arguments_json=function["arguments"])
    try:
        images.check(message)
    except images.ImageError as error:
        raise BadRequest(str(error)) from error
    return message


def _image(url: str) -> pb.Image:
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise BadRequest("an image must be a data: URL in base64")
    try:
        return pb.Image(data=base64.b64decode(data, validate=True), mime_type=head[len("data:") : -len(";base64")])
    except binascii.Error as error:
        raise BadRequest(f"an image is not base64: {error}") from error


def _tool(entry: dict[str, Any]) -> environment_pb.Tool:
    function = entry["function"]
    parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
    return environment_pb.Tool(
        name=function["name"], description=function.get("description") or "", parameters_json=parameters
    )


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest("a tool call's arguments are not JSON") from error
