"""Llama 3:  {"name": "add", "parameters": {"a": 1}}  as the whole message or after <|python_tag|>; `;` between calls.

A message that is a JSON object without a name calls nothing: it is content, unless the tag stands before it.
"""

from __future__ import annotations

from services.rollout.tool_parsers import json_text
from services.rollout.tool_parsers.findings import UNREADABLE, Findings

TAG = "<|python_tag|>"


def parse(text: str, findings: Findings) -> None:
    position = json_text.skip_space(text, 0)
    tagged = text.startswith(TAG, position)
    if not tagged and not text.startswith("{", position):
        position = text.find(TAG)
        tagged = position >= 0
    if position < 0:
        findings.outside.append(text)
        return
    findings.outside.append(text[:position])
    if not tagged and _is_content(text, position):
        findings.outside.append(text[position:])
        return
    while position < len(text):
        if findings.full:
            return
        body = position + len(TAG) if text.startswith(TAG, position) else position
        try:
            value, position = json_text.read(text, body)
            if not isinstance(value, dict):
                raise ValueError("not a JSON object")
            name = "arguments" if "arguments" in value and "parameters" not in value else "parameters"
            findings.add(value.get("name"), value.get(name), arguments_name=name)
        except UNREADABLE as error:
            following = text.find(TAG, body)
            position = following if following >= 0 else len(text)
            findings.complain(error, text[body:position])
            continue
        after = position
        if text.startswith(";", after):
            after = json_text.skip_space(text, after + 1)
        if not text.startswith(("{", TAG), after):
            following = text.find(TAG, after)
            findings.outside.append(text[after : following if following >= 0 else len(text)])
            after = following if following >= 0 else len(text)
        position = after


def _is_content(text: str, start: int) -> bool:
    try:
        value, _ = json_text.read(text, start)
    except UNREADABLE:
        return False
    return isinstance(value, dict) and "name" not in value
