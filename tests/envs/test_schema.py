"""services.envs.schema: what a signature tells a policy, and what of a policy's arguments fits it."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from services.envs.schema import ArgumentError, Parameters, schema_of


@dataclass
class Point:
    x: int
    y: float = 0.5
    tags: list[str] = field(default_factory=list)

    def __post_init__(self):
        if self.x < 0:
            raise ValueError("x is below 0")


class Size(TypedDict):
    width: int
    height: NotRequired[int]


def example(  # noqa: PLR0917
    count: int,
    share: float,
    name: str,
    on: bool,
    rows: list[dict[str, int]],
    mode: Annotated[Literal["fast", 3], "how"],
    point: Point,
    size: Size,
    maybe: int | None = None,
    either: int | str = 4,
):
    """Does it.

    Args:
        count: how many
            of them
        share (float): of all

    Returns:
        name: nothing
    """


def test_the_schema_says_every_type():
    assert Parameters(example).schema == {
        "type": "object",
        "properties": {
            "count": {"type": "integer", "description": "how many of them"},
            "share": {"type": "number", "description": "of all"},
            "name": {"type": "string"},
            "on": {"type": "boolean"},
            "rows": {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "integer"}}},
            "mode": {"enum": ["fast", 3], "description": "how"},
            "point": {
                "type": "object",
                "properties": {
                    "x": {"type": "integer"},
                    "y": {"type": "number", "default": 0.5},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["x"],
                "additionalProperties": False,
            },
            "size": {
                "type": "object",
                "properties": {"width": {"type": "integer"}, "height": {"type": "integer"}},
                "required": ["width"],
                "additionalProperties": False,
            },
            "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": 4},
        },
        "required": ["count", "share", "name", "on", "rows", "mode", "point", "size"],
        "additionalProperties": False,
    }


GIVEN = {
    "count": 2,
    "share": 1,
    "name": "n",
    "on": False,
    "rows": [{"a": 1}],
    "mode": "fast",
    "point": {"x": 1},
    "size": {"width": 1},
}


def test_arguments_come_as_their_types():
    bound = Parameters(example).bind(json.dumps({**GIVEN, "count": 2.0, "maybe": None, "either": "x"}))
    assert bound == {
        **GIVEN,
        "share": 1.0,
        "point": Point(1),
        "maybe": None,
        "either": "x",
    }
    assert type(bound["count"]) is int and type(bound["share"]) is float


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"count": "2"}, 'argument count must be an integer, not "2"'),
        ({"count": 2.5}, "argument count must be an integer, not 2.5"),
        ({"count": True}, "argument count must be an integer, not true"),
        ({"count": None}, "argument count must be an integer, not null"),
        ({"on": 1}, "argument on must be a boolean, not 1"),
        ({"share": "x" * 200}, 'argument share must be a number, not "xxx'),
        ({"share": 10**400}, "argument share is too large"),
        ({"share": float("inf")}, "not JSON"),
        ({"share": float("nan")}, "not JSON"),
        ({"mode": "\ud800"}, "lone surrogate"),
        ({"\udfff": 1}, "lone surrogate"),
        ({"rows": {}}, "argument rows must be an array, not {}"),
        ({"rows": [{"a": 1}, {"b": "1"}]}, 'argument rows[1].b must be an integer, not "1"'),
        ({"mode": True}, 'argument mode must be one of ["fast", 3], not true'),
        ({"point": {}}, "argument point.x is missing"),
        ({"point": {"x": -1}}, "argument point: x is below 0"),
        ({"point": 1}, "argument point must be an object, not 1"),
        ({"size": {"width": 1, "depth": 1}}, 'no argument size."depth", but width, height'),
        ({"either": []}, "either must be an integer, not [] or argument either must be a string, not []"),
        ({"maybe": "x"}, 'argument maybe must be an integer, not "x"'),
        ({"more": 1}, 'no argument "more", but count, share'),
    ],
)
def test_what_does_not_fit_is_said(changed, says):
    with pytest.raises(ArgumentError) as caught:
        Parameters(example).bind(json.dumps({**GIVEN, **changed}))
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", "null", "NaN", "[" * 100_000])
def test_what_is_no_object_is_said(text):
    with pytest.raises(ArgumentError, match=r"not JSON|must be a JSON object"):
        Parameters(example).bind(text)


def test_a_number_that_no_float_holds_is_said():
    text = json.dumps({**GIVEN, "share": 0}).replace('"share": 0', '"share": 1e999')
    with pytest.raises(ArgumentError, match="argument share is too large"):
        Parameters(example).bind(text)


def test_a_missing_argument_is_said_and_none_are_needed_without_parameters():
    with pytest.raises(ArgumentError, match="argument count is missing"):
        Parameters(example).bind("")
    assert Parameters(lambda: None).bind("") == {}


@pytest.mark.parametrize("annotation", [Any, object, bytes, list, dict, dict[int, str], set[int], tuple[int], complex])
def test_other_annotations_are_refused(annotation):
    with pytest.raises(TypeError, match="no JSON schema for"):
        schema_of(annotation)


def test_a_signature_that_no_policy_can_call_is_refused():
    def unannotated(x):
        pass

    def positional(x: int, /):
        pass

    def starred(*x: int):
        pass

    def unknown(x: "Nowhere"):  # noqa: F821
        pass

    def deep(x: list[dict[str, bytes]]):
        pass

    for function, says in [
        (unannotated, "annotate x"),
        (positional, "names its arguments"),
        (starred, "names its arguments"),
        (unknown, "'Nowhere' is not defined"),
        (deep, "deep: x: no JSON schema for bytes"),
    ]:
        with pytest.raises(TypeError, match=says):
            Parameters(function)
