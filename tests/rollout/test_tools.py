"""services.rollout.tools with Hermes: every text is an action; what cannot be read is told, never raised."""

import json
import random
import time

import pytest

from headrace.v1 import environment_service_pb2 as environment_pb
from services.rollout.tool_parsers.findings import MAX_CALLS, MAX_LINE_CHARACTERS
from services.rollout.tool_parsers.hermes import CLOSE, OPEN
from services.rollout.tools import parse


def call(name="add", arguments=None) -> str:
    return f"{OPEN}{json.dumps({'name': name, 'arguments': arguments or {}})}{CLOSE}"


def read(text: str) -> tuple[str, list[tuple[str, str, object]], list[str]]:
    action = parse(text, "hermes")
    assert action.message.role == "assistant"
    calls = [(c.id, c.name, json.loads(c.arguments_json)) for c in action.message.tool_calls]
    return action.message.content, calls, list(action.malformed_tool_calls)


def test_text_without_calls_is_content():
    assert read(" four \n") == ("four", [], [])
    assert read("") == ("", [], [])
    assert read("a </tool_call> b") == ("a </tool_call> b", [], [])


def test_without_a_parser_everything_is_content():
    text = f" {call()} "
    action = parse(text, "none")
    assert action.message.content == text and not action.message.tool_calls and not action.malformed_tool_calls


def test_calls_are_read_in_order():
    text = f"Let me see.\n{call('add', {'a': 1})}\n{call('wait')}\ndone"
    assert read(text) == ("Let me see.\n\n\ndone", [("call_0", "add", {"a": 1}), ("call_1", "wait", {})], [])


def test_white_space_and_unicode_inside():
    text = OPEN + '\n {"name": "säge", "arguments": {"é": "\\u0000🙂"}} \n' + CLOSE
    assert read(text) == ("", [("call_0", "säge", {"é": "\0🙂"})], [])
    assert "é" in parse(text, "hermes").message.tool_calls[0].arguments_json


def test_tags_within_strings_are_text():
    arguments = {"text": f"{CLOSE} and {OPEN} and }}}}"}
    assert read(call("say", arguments)) == ("", [("call_0", "say", arguments)], [])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "not JSON (Expecting value)"),
        ('{"a":', "not JSON (Expecting value)"),
        ("add(1, 2)", "not JSON (Expecting value)"),
        ("{'name': 'add'}", "not JSON"),
        ("[1]", "not a JSON object"),
        ("null", "not a JSON object"),
        ('{"arguments": {}}', '"name" must be a string'),
        ('{"name": 3, "arguments": {}}', '"name" must be a string'),
        ('{"name": "", "arguments": {}}', '"name" must be a string'),
        ('{"name": "\\ud800", "arguments": {}}', '"name" is no text'),
        ('{"name": "add"}', '"arguments" must be an object'),
        ('{"name": "add", "arguments": [1]}', '"arguments" must be an object'),
        ('{"name": "add", "arguments": "{}"}', '"arguments" must be an object'),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no JSON number"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "Out of range float values"),
        ('{"name": "add", "arguments": {}} {}', f"no {CLOSE} after the JSON object"),
        ('{"name": "add", "arguments": {"a": ' + "[" * 100_000 + "}}", "nested too deeply"),
        ('{"name": "add", "arguments": {"a": ' + "1" * 10_000 + "}}", "Exceeds the limit"),
    ],
)
def test_a_malformed_call_is_told_and_the_others_stay(body, reason):
    content, calls, malformed = read(f"a{OPEN}{body}{CLOSE}b{call()}")
    assert content == "ab" and calls == [("call_0", "add", {})]
    assert len(malformed) == 1 and malformed[0].startswith(reason)
    assert "\n" not in malformed[0] and len(malformed[0]) <= MAX_LINE_CHARACTERS


def test_an_unclosed_call_is_malformed():
    assert read(f'a {OPEN}{{"name": "add", "arguments": {{}}}}')[:2] == ("a", [])
    assert read(f'a {OPEN}{{"name": "add"')[2][0].startswith("not JSON")
    assert read(OPEN) == ("", [], ["not JSON (Expecting value):"])


def test_a_lone_surrogate_in_arguments_can_be_sent():
    assert read(OPEN + '{"name": "a", "arguments": {"b": "\\ud800"}}' + CLOSE)[1] == [("call_0", "a", {"b": "\ud800"})]
    assert parse("\ud800", "hermes").message.content == "?"


def test_calls_are_bounded():
    content, calls, malformed = read("a" + call() * 100 + "b")
    assert content == "a" and len(calls) == MAX_CALLS
    assert malformed == [f"more than {MAX_CALLS} tool calls in one message; the rest is ignored"]


@pytest.mark.parametrize(
    "piece",
    [
        OPEN,
        CLOSE,
        OPEN + CLOSE,
        OPEN + '{"',
        OPEN + '{"a":"' + CLOSE,
        OPEN + "[" * 50 + CLOSE + "\n",
        "{",
        "\0",
        "🙂\n",
    ],
)
def test_a_megabyte_of_it_takes_no_time(piece):
    text = piece * (1_000_000 // len(piece))
    start = time.perf_counter()
    parse(text, "hermes")
    assert time.perf_counter() - start < 0.5


def test_any_text_is_an_action():
    pieces = [
        OPEN,
        CLOSE,
        '{"name": "a"',
        ', "arguments": {',
        "}",
        "{",
        '"',
        "\\",
        "[",
        "\0",
        "é🙂",
        "\ud83d",
        " \n",
        "x",
    ]
    draw = random.Random(0)
    for _ in range(5_000):
        text = "".join(draw.choices(pieces, k=draw.randrange(30)))
        action = parse(text, "hermes")
        assert environment_pb.Action.FromString(action.SerializeToString()) == action
        opened = text.count(OPEN)
        assert len(action.message.tool_calls) + len(action.malformed_tool_calls) <= opened
        assert bool(opened) == bool(action.message.tool_calls or action.malformed_tool_calls)
        for made in action.message.tool_calls:
            assert made.name and isinstance(json.loads(made.arguments_json), dict)
        assert all("\n" not in line and len(line) <= MAX_LINE_CHARACTERS for line in action.malformed_tool_calls)
