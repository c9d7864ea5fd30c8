"""Hermes and Qwen:  <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>  any number of times."""

from __future__ import annotations

from services.rollout.tool_parsers import json_text
from services.rollout.tool_parsers.findings import UNREADABLE, Findings

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse(text: str, findings: Findings) -> None:
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        findings.outside.append(text[position:start])
        if findings.full:
            return
        body = start + len(OPEN)
        try:
            value, end = json_text.read(text, body)
            if not text.startswith(CLOSE, end):
                raise ValueError(f"no {CLOSE} after the JSON object")
            if not isinstance(value, dict):
                raise ValueError("not a JSON object")
            findings.add(value.get("name"), value.get("arguments"))
            position = end + len(CLOSE)
        except UNREADABLE as error:
            end = text.find(CLOSE, body)
            findings.complain(error, text[body:end] if end >= 0 else text[body:])
            position = end + len(CLOSE) if end >= 0 else len(text)
    findings.outside.append(text[position:])
