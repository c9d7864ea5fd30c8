"""Assistant text to an action: its content, its tool calls, and what was wrong with those that could not be read.

Pure. What the policy writes is never an error here: a call that cannot be read becomes a line of
`malformed_tool_calls`, which the environment answers, so that the policy can learn from it. The grammars, each of a
family of models, are in `tool_parsers`; which one a run uses is its `rollout.tool_parser`.

What the assistant thinks before it acts (<think>…</think>) is no part of the content and calls no tools; it stays in
the tokens, which are what is trained on, and in the message's `thinking`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence

from headrace.v1 import environment_service_pb2 as environment_pb
from headrace.v1 import trajectory_pb2 as pb
from services.rollout.tool_parsers import hermes, llama3_json, pythonic, xml
from services.rollout.tool_parsers.findings import Findings

THINK, THOUGHT = "<think>", "</think>"

_GRAMMARS: dict[str, Callable[[str, Findings], None]] = {
    "none": lambda text, findings: findings.outside.append(text),
    "hermes": hermes.parse,
    "llama3_json": llama3_json.parse,
    "pythonic": pythonic.parse,
    "xml": xml.parse,
}
# A text that begins so does not think, and what stands after one of them is a call's.
_CALLS = ("<tool_call>", "<function=", llama3_json.TAG)


def parse(
    text: str, parser: str, *, tools: Sequence[environment_pb.Tool] = (), thinking: str = "apart"
) -> environment_pb.Action:
    """The action of an assistant's text.

    Args:
        text: what the policy wrote.
        parser: a choice of `rollout.tool_parser`. With "none" the whole text is content; else content is what stands
            outside the calls, stripped. Calls are named call_0, call_1, … in order.
        tools: what the episode offers; grammars whose values are plain text take the arguments' types from them.
        thinking: "apart", or "content": thoughts stay where they are, and may call tools.
    """
    # A lone surrogate is no character and cannot be sent.
    text = text.encode("utf-8", "replace").decode()
    thought = ""
    if thinking == "apart":
        thought, text = _split_thinking(text)
    findings = Findings({tool.name: _types(tool.parameters_json) for tool in tools} if parser == "xml" else {})
    _GRAMMARS[parser](text, findings)
    content = "".join(findings.outside)
    message = pb.Message(
        role="assistant",
        content=content if parser == "none" else content.strip(),
        tool_calls=findings.calls,
        thinking=thought,
    )
    return environment_pb.Action(message=message, malformed_tool_calls=findings.malformed)


def _split_thinking(text: str) -> tuple[str, str]:
    """What is thought at the beginning, and the rest. Thinking without an end leaves no rest.

    Templates that open the thinking themselves leave only its end to the policy.
    """
    start = text.lstrip()
    if start.startswith(THINK):
        thought, _, rest = start[len(THINK) :].partition(THOUGHT)
        return thought.strip(), rest.lstrip()
    end = text.find(THOUGHT)
    if end < 0 or start.startswith(("[", "{")) or any(0 <= text.find(call) < end for call in _CALLS):
        return "", text
    return text[:end].strip(), text[end + len(THOUGHT) :].lstrip()


@functools.lru_cache(maxsize=1024)
def _types(parameters_json: str) -> dict[str, str]:
    """The JSON types that a schema declares for arguments."""
    try:
        properties = json.loads(parameters_json or "{}").get("properties", {})
        return {name: _type(schema) for name, schema in properties.items()}
    except (ValueError, AttributeError):  # the author's text; the renderer refuses what is no JSON
        return {}


def _type(schema: dict[str, object]) -> str:
    """The type of a schema: "string" if it may be one, "any" if it is not told in one word."""
    kind = schema.get("type", "any")
    options = kind if isinstance(kind, list) else [kind]
    return "string" if "string" in options else str(options[0]) if len(options) == 1 else "any"
