"""services.envs.marked_answer: which part of a reply counts."""

import pytest

from services.envs.marked_answer import in_fence, in_tag


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<a>4</a>", "4"),
        ("<a>3</a> no, <a>4\n</a>!", "4\n"),
        ("<a>3<a>4</a>", "4"),
        ("<a>4</a> so </a>", "4"),
        ("<a>4</a> <a>5", "4"),
        ("</a>4<a>", None),
        ("<a></a>", ""),
        ("4", None),
        ("<a>" * 100_000, None),
        ("<a>" * 100_000 + "4</a>", "4"),
    ],
)
def test_the_last_closed_tag_counts(text, answer):
    assert in_tag(text, "a") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4", "4"),
        ("so:\n```json\n4\n```", "4\n"),
        ("```\n3\n```\n```json  \n4\n```\nthat is it", "4\n"),
        ("```python\n3\n```", "```python\n3\n```"),
        ("```json\n4", "```json\n4"),
        # These take minutes where blanks can be matched in several ways.
        ("```" + "\n" * 100_000, "```" + "\n" * 100_000),
        ("```json" + " \n" * 100_000, "```json" + " \n" * 100_000),
    ],
)
def test_the_last_fence_counts(text, answer):
    assert in_fence(text) == answer
