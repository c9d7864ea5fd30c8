"""A Hugging Face chat template: chat messages in, the text of a conversation out.

Pure but for `load`, which reads the model's folder. Renders as transformers' `apply_chat_template` does (sandboxed
Jinja, the same options, filters and globals) without importing it, so that a gateway stays light. Templates keep no
state: any number of threads may render at once.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.v1 import environment_service_pb2 as environment_pb
from headrace.v1 import trajectory_pb2 as pb


class RenderError(ValueError):
    """Messages that the template refuses, or cannot place after a sampled action."""


class ChatTemplate:
    """The template of one model."""

    def __init__(self, source: str, special_tokens: dict[str, str]):
        """Compiles it. Raises RenderError when it is no Jinja template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise RenderError(f"is no Jinja template: {_line(error)}") from error
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """The template of a model's folder: chat_template.jinja, else the one in tokenizer_config.json.

        Raises RenderError when there is none.
        """
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not source:
            raise RenderError("is missing")
        tokens = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in settings.items()
            if name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
        }
        return cls(source, tokens)

    def render(
        self,
        messages: Sequence[pb.Message],
        *,
        tools: Sequence[environment_pb.Tool] = (),
        add_generation_prompt: bool,
    ) -> str:
        """The conversation's text, ending in the assistant's header if so asked.

        Raises RenderError: the template refuses the messages, or a JSON field of theirs is none.
        """
        try:
            return self._template.render(
                messages=[_message(message) for message in messages],
                tools=[_tool(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message.role for message in messages)
            raise RenderError(f"cannot render the messages ({roles}): {_line(error)}") from error


def _message(message: pb.Message) -> dict[str, Any]:
    rendered: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": json.loads(call.arguments_json)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        rendered["tool_call_id"] = message.tool_call_id
    return rendered


def _tool(tool: environment_pb.Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": json.loads(tool.parameters_json or "{}"),
    }
    return {"type": "function", "function": function}


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Generation(Extension):
    """`{% generation %}` marks assistant text for loss masks; ours come from the sampled ids, so it only renders."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
