"""Where in a reply its answer stands: in a tag, or in a code fence. Takes linear time, whatever the text holds."""

from __future__ import annotations

import re

# A blank after the fence's line could be matched in two ways, which takes quadratic time where no end follows.
_FENCE = re.compile(r"```(?:json)?[ \t\r]*\n(.*?)```", re.DOTALL)


def in_tag(text: str, tag: str) -> str | None:
    """What stands between the last <tag> that is closed and its </tag>; None without one."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.rfind(opening, 0, max(0, text.rfind(closing)))
    if start < 0:
        return None
    start += len(opening)
    return text[start : text.index(closing, start)]


def in_fence(text: str) -> str:
    """What stands in the last code fence, of JSON or of no language; the whole text without one."""
    found = _FENCE.findall(text)
    return found[-1] if found else text
