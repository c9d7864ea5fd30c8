"""How the text of an answer becomes a reward, by the name that a run's config gives.

    exact            the answer, without the space around it, is `expected`
    regex            `expected` is found in the answer
    json             the answer is a JSON value, in a code fence or not, that equals `expected`; no name occurs twice
    module:function  called with the answer and the task, or awaited: a number, a bool, or None for "no judgement"

A verifier evaluates nothing that a model wrote.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from services.envs import marked_answer

Verifier = Callable[[str, Mapping[str, Any]], Awaitable[float]]


class NoJudgement(Exception):
    """Nobody can say what the answer is worth: the episode has failed, which differs from a reward of 0."""


def find(name: str) -> Verifier:
    """The verifier of a name: it takes an answer and its task, and raises NoJudgement. Raises ValueError."""
    if ":" in name:
        return _custom(name)
    if name not in _VERIFIERS:
        raise ValueError(f"no verifier {name!r}: name one of {', '.join(_VERIFIERS)}, or module:function")
    is_right = _VERIFIERS[name]

    async def verify(answer: str, task: Mapping[str, Any]) -> float:
        return float(is_right(answer, task["expected"]))

    return verify


def check(name: str, task: Mapping[str, Any]) -> None:
    """Raises ValueError where a task lacks what the verifier compares with."""
    if ":" in name:
        return
    if "expected" not in task:
        raise ValueError(f"the verifier {name} needs `expected` in every task, and {dict(task)} has none")
    if name == "regex":
        try:
            re.compile(task["expected"])
        except (re.error, TypeError) as error:
            raise ValueError(f"{task['expected']!r} is no regular expression: {error}") from error


def _exact(answer: str, expected: Any) -> bool:
    return answer.strip() == str(expected).strip()


def matches(answer: str, expected: str) -> bool:
    """Whether the pattern is found. Some patterns take for ever: not for the event loop."""
    return re.search(expected, answer) is not None


def _json(answer: str, expected: Any) -> bool:
    try:
        given = json.loads(marked_answer.in_fence(answer), object_pairs_hook=_object, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    # As text, for in Python True equals 1.
    return _canonical(given) == _canonical(expected)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a name that occurs twice: an answer must not say two things."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name occurs twice")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _custom(name: str) -> Verifier:
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the verifier {name} cannot be imported: {error}") from error

    async def verify(answer: str, task: Mapping[str, Any]) -> float:
        judged = function(answer, task)
        judged = await judged if inspect.isawaitable(judged) else judged
        if judged is None:
            raise NoJudgement(f"{name} gave no judgement")
        return float(judged)

    return verify


_VERIFIERS: dict[str, Callable[[str, Any], bool]] = {"exact": _exact, "regex": matches, "json": _json}
