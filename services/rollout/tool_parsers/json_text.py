"""A JSON value within a text: where it ends is up to the JSON, so a closing tag within a string closes nothing."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def read(text: str, start: int) -> tuple[Any, int]:
    """The value that starts at `start`, after white space, and where the white space after it ends.

    Raises ValueError or RecursionError where there is none.
    """
    value, end = _DECODER.raw_decode(text, skip_space(text, start))
    return value, skip_space(text, end)


def skip_space(text: str, start: int) -> int:
    """Where the white space from `start` on ends."""
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
