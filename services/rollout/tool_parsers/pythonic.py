"""Llama 4 and Gemma:  [add(a=1, b=2), say(text="x")]  a Python list of calls whose arguments are named literals.

Read by Python's parser and never run: an argument that is no literal makes its call malformed. Text may stand around
the list; the marks that Llama 4 and Gemma put around it belong to it.
"""

from __future__ import annotations

import ast
import re
import warnings

from services.rollout.tool_parsers.findings import UNREADABLE, Findings

MAX_LIST_CHARACTERS = 100_000

_START = re.compile(r"(?:<\|python_start\|>|```(?:tool_code|python)?)?\s{0,8}(?=\[\s{0,8}[^\W\d][\w.]{0,200}\()")
_MARK_AFTER = re.compile(r"\s{0,8}(?:<\|python_end\|>|```)")
# What matters to where a list ends: strings and brackets.
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|[\[\](){}"\']', re.DOTALL)


def parse(text: str, findings: Findings) -> None:
    position = 0
    while match := _START.search(text, position):
        findings.outside.append(text[position : match.start()])
        if findings.full:
            return
        body = match.end()
        end = _end(text, body)
        try:
            if end < 0:
                raise ValueError("the list of calls does not end")
            if end - body > MAX_LIST_CHARACTERS:
                raise ValueError(f"longer than {MAX_LIST_CHARACTERS} characters")
            calls = _calls(text[body:end])
        except UNREADABLE as error:
            findings.complain(error, text[body:end] if end >= 0 else text[body:])
            position = end if end >= 0 else len(text)
        else:
            for node in calls:
                if findings.full:
                    return
                _read(node, findings)
            position = end
        if mark := _MARK_AFTER.match(text, position):
            position = mark.end()
    findings.outside.append(text[position:])


def _end(text: str, start: int) -> int:
    """Where the list that opens at `start` ends, brackets within strings apart; -1 if it does not."""
    depth = 0
    for piece in _PIECE.finditer(text, start):
        character = piece.group()
        if character in "[({":
            depth += 1
        elif character in "])}":
            depth -= 1
            if depth == 0:
                return piece.end()
    return -1


def _calls(source: str) -> list[ast.expr]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unknown escape in a string is no news
        parsed = ast.parse(source, mode="eval").body
    if not isinstance(parsed, ast.List):
        raise ValueError("not a list of calls")
    return parsed.elts


def _read(node: ast.expr, findings: Findings) -> None:
    try:
        if not isinstance(node, ast.Call):
            raise ValueError("not a call")
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            raise ValueError("arguments must be named")
        arguments: dict[str, object] = {}
        for keyword in node.keywords:
            assert keyword.arg is not None
            if keyword.arg in arguments:
                raise ValueError(f"{keyword.arg} is given twice")
            arguments[keyword.arg] = _literal(keyword.arg, keyword.value)
        findings.add(_dotted(node.func), arguments)
    except UNREADABLE as error:
        findings.complain(error, _source(node))


def _literal(name: str, node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ValueError(f"{name} must be a literal") from error


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError("what is called must be a name")
    return node.id


def _source(node: ast.expr) -> str:
    try:
        return ast.unparse(node)
    except UNREADABLE:
        return ""
