"""Qwen3-Coder:  <tool_call><function=add><parameter=a>1</parameter></function></tool_call>, with or without tool_call.

A value is text. Where the tool declares another type than a string it is read as JSON; what cannot be stays text, and
the environment says what it wants. A value ends at the </parameter> after which the call goes on, so that it may
contain the tag; one newline at either end belongs to the layout.
"""

from __future__ import annotations

import re

from services.rollout.tool_parsers import json_text
from services.rollout.tool_parsers.findings import UNREADABLE, Findings

_OPEN = re.compile(r"(?:<tool_call>\s{0,8})?<function=")
_CLOSE = "</function>"
_WRAPPER_AFTER = re.compile(r"\s{0,8}</tool_call>")
_PARAMETER = "<parameter="
_VALUE_END = re.compile(r"</parameter>(?=\s{0,80}(?:<parameter=|</function>))")


def parse(text: str, findings: Findings) -> None:
    position = 0
    while match := _OPEN.search(text, position):
        findings.outside.append(text[position : match.start()])
        if findings.full:
            return
        body = match.end()
        try:
            position = _read(text, body, findings)
        except UNREADABLE as error:
            end = text.find(_CLOSE, body)
            findings.complain(error, text[body:end] if end >= 0 else text[body:])
            position = end + len(_CLOSE) if end >= 0 else len(text)
        if wrapper := _WRAPPER_AFTER.match(text, position):
            position = wrapper.end()
    findings.outside.append(text[position:])


def _read(text: str, start: int, findings: Findings) -> int:
    """Reads the call whose name starts at `start`; where the text goes on after it."""
    name, position = _tag_name(text, start)
    arguments: dict[str, object] = {}
    while True:
        position = json_text.skip_space(text, position)
        if text.startswith(_CLOSE, position):
            findings.add(name, arguments)
            return position + len(_CLOSE)
        if not text.startswith(_PARAMETER, position):
            raise ValueError(f"neither {_PARAMETER}…> nor {_CLOSE} follows")
        argument, value_start = _tag_name(text, position + len(_PARAMETER))
        end = _VALUE_END.search(text, value_start)
        if end is None:
            raise ValueError(f"the parameter {argument} does not end")
        value = text[value_start : end.start()]
        if "<function=" in value:
            raise ValueError(f"the parameter {argument} does not end before another call")
        if argument in arguments:
            raise ValueError(f"the parameter {argument} is given twice")
        arguments[argument] = _typed(value.removeprefix("\n").removesuffix("\n"), findings.type_of(name, argument))
        position = end.end()


def _tag_name(text: str, start: int) -> tuple[str, int]:
    """The name that a tag gives after its =, and where the tag ends."""
    end = text.find(">", start, start + 300)
    name = text[start:end].strip() if end >= 0 else ""
    if not name or any(character in name for character in "<\n"):
        raise ValueError("a tag names nothing")
    return name, end + 1


def _typed(value: str, kind: str) -> object:
    if kind in ("", "string"):
        return value
    try:
        read, end = json_text.read(value, 0)
    except (ValueError, RecursionError):
        lowered = value.strip().lower()  # models write True as often as true
        return lowered == "true" if kind == "boolean" and lowered in ("true", "false") else value
    return read if end == len(value) else value
