"""services.rollout.tools with each grammar: what is a call, what is content, and what is told to the environment."""

import json
import random
from pathlib import Path

import pytest

from headrace.v1 import environment_service_pb2 as environment_pb
from services.rollout.tool_parsers.findings import MAX_CALLS, MAX_LINE_CHARACTERS
from services.rollout.tools import parse

ADD = environment_pb.Tool(
    name="add",
    parameters_json=json.dumps(
        {
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": ["number", "null"]},
                "on": {"type": "boolean"},
                "items": {"type": "array"},
                "text": {"type": ["null", "string"]},
            }
        }
    ),
)
# One call of each grammar with the argument `text`, and one without arguments.
SAY = {
    "hermes": '<tool_call>\n{"name": "say", "arguments": {"text": "TEXT"}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "say", "parameters": {"text": "TEXT"}}',
    "pythonic": '[say(text="TEXT")]',
    "xml": "<tool_call>\n<function=say>\n<parameter=text>\nTEXT\n</parameter>\n</function>\n</tool_call>",
}
# Each broken call, alone in its message.
BROKEN = {
    "hermes": ['<tool_call>{"a":', "<tool_call>say</tool_call>", '<tool_call>{"name": "say"}</tool_call>'],
    "llama3_json": ['{"a":', '{"name": "say", "parameters": 3}', '<|python_tag|>print("x")', '{"name": "say", "par'],
    "pythonic": [
        "[say(text=",
        '[say("x")]',
        "[say(text=open('x'))]",
        "[say(text=__import__('os').system('touch canary'))]",
        "[say(text={1, 2})]",
        "[say(text=b'x')]",
        "[say(text=1j)]",
        "[say(text=1e999)]",
        "[say(a=1, a=2)]",
        "[say(**{'a': 1})]",
        "[say(a=1)(b=2)]",
        "[say(text='\\ud800' 3)]",
        "[say(text=" + "(" * 5_000 + ")" * 5_000 + ")]",
        "[say(text=" + "-" * 50_000 + "1)]",
        "[say(text=" + "1+" * 40_000 + "1)]",
        "[say(text=" + "1" * 10_000 + ")]",
        "[say(text=0)" + " " * 100_000 + "]",
    ],
    "xml": [
        "<function=say>",
        "<function=say><parameter=text>x",
        "<function=say><parameter=text>x</function>",
        "<function=say>x</function>",
        "<function=><parameter=a>x</parameter></function>",
        "<tool_call><function=say<parameter=a>x</parameter></function></tool_call>",
        "<function=say><parameter=a>1</parameter><parameter=a>2</parameter></function>",
    ],
}
GRAMMARS = sorted(SAY)


def read(text, parser, **options):
    action = parse(text, parser, **options)
    calls = [(call.id, call.name, json.loads(call.arguments_json)) for call in action.message.tool_calls]
    return action.message.content, calls, list(action.malformed_tool_calls)


def say(parser, text):
    """A call with this text, as the grammar quotes it."""
    return SAY[parser].replace("TEXT", text if parser == "xml" else json.dumps(text, ensure_ascii=False)[1:-1])


@pytest.mark.parametrize("parser", GRAMMARS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "säge 🙂",
        'it\'s "so"',
        "a\\b\n\tc",
        "</tool_call> </function> ]) }} ; [f(a=1)] <think>",
        '{"name": "x", "parameters": {}}',
    ],
)
def test_a_call_gives_back_its_text(parser, text):
    assert read(f"Hm. {say(parser, text)}", parser) == ("Hm.", [("call_0", "say", {"text": text})], [])


@pytest.mark.parametrize("parser", GRAMMARS)
def test_text_without_calls_is_content(parser):
    for text in ("four", "", "a [1] b", "see (x) and [y]", "a < b", "no } call {"):
        assert read(f" {text}\n", parser) == (text, [], [])


@pytest.mark.parametrize("parser", GRAMMARS)
def test_two_calls_are_read_in_order(parser):
    content, calls, malformed = read(say(parser, "a") + "\n" + say(parser, "b"), parser)
    assert calls == [("call_0", "say", {"text": "a"}), ("call_1", "say", {"text": "b"})]
    assert (content, malformed) == ("", [])


@pytest.mark.parametrize("parser", GRAMMARS)
def test_a_malformed_call_is_told(parser):
    for broken in BROKEN[parser]:
        content, calls, malformed = read(broken, parser)
        assert not calls and len(malformed) == 1, (broken[:60], calls, malformed)
        assert "\n" not in malformed[0] and 0 < len(malformed[0]) <= MAX_LINE_CHARACTERS
        assert not content.strip("])")
    assert not Path("canary").exists()


@pytest.mark.parametrize("parser", ["hermes", "pythonic", "xml"])
def test_a_malformed_call_leaves_those_after_it(parser):
    broken = {
        "hermes": "<tool_call>{}</tool_call>",
        "pythonic": "[say(1)]",
        "xml": "<function=say><parameter=text>x</function>",
    }[parser]
    content, calls, malformed = read(f"a {broken} b {say(parser, 'c')} d", parser)
    assert calls == [("call_0", "say", {"text": "c"})] and len(malformed) == 1
    assert content.split() == ["a", "b", "d"]


@pytest.mark.parametrize("parser", GRAMMARS)
def test_calls_are_bounded(parser):
    _, calls, malformed = read("\n".join([say(parser, "x")] * 100), parser)
    assert len(calls) == MAX_CALLS
    assert malformed == [f"more than {MAX_CALLS} tool calls in one message; the rest is ignored"]


@pytest.mark.parametrize("parser", GRAMMARS)
def test_any_text_is_an_action(parser):
    whole = [*SAY.values(), *(broken for broken in BROKEN[parser] if len(broken) < 200)]
    pieces = [*whole, *(piece[: len(piece) // 2] for piece in whole), *(piece[len(piece) // 2 :] for piece in whole)]
    pieces += [
        "[",
        "{",
        "(",
        '"',
        "'",
        "\\",
        ";",
        "\0",
        "🙂",
        "\ud83d",
        "\n",
        "<think>",
        "</think>",
        "f(",
        "</parameter>",
    ]
    draw = random.Random(0)
    for _ in range(2_000):
        text = "".join(draw.choices(pieces, k=draw.randrange(12)))
        action = parse(text, parser, tools=[ADD])
        assert environment_pb.Action.FromString(action.SerializeToString()) == action
        for number, call in enumerate(action.message.tool_calls):
            assert call.name and call.id == f"call_{number}" and isinstance(json.loads(call.arguments_json), dict)
        assert all("\n" not in line and len(line) <= MAX_LINE_CHARACTERS for line in action.malformed_tool_calls)


def test_llama_writes_calls_without_a_tag():
    two = '{"name": "a", "parameters": {"x": 1}}; {"type": "function", "name": "b", "arguments": {}}'
    assert read(two, "llama3_json") == ("", [("call_0", "a", {"x": 1}), ("call_1", "b", {})], [])
    assert read('{"answer": 4}', "llama3_json") == ('{"answer": 4}', [], [])
    assert read('{"name": "a", "parameters": {}} done', "llama3_json") == ("done", [("call_0", "a", {})], [])


def test_python_calls_come_in_one_list():
    text = "[a(x=-1, y=[True, None, {'k': (1, 2.5)}]), b.c(), d(text='it''s'), 3, e(y=z)]"
    content, calls, malformed = read(text, "pythonic")
    assert [(name, arguments) for _, name, arguments in calls] == [
        ("a", {"x": -1, "y": [True, None, {"k": [1, 2.5]}]}),
        ("b.c", {}),
        ("d", {"text": "its"}),
    ]
    assert malformed == ["not a call: 3", "y must be a literal: e(y=z)"] and content == ""
    for marked in ("<|python_start|>[a()]<|python_end|>", "```tool_code\n[a()]\n```"):
        assert read(f"So: {marked} .", "pythonic") == ("So:  .", [("call_0", "a", {})], [])


def test_xml_values_take_the_type_that_the_tool_declares():
    values = {"a": "3", "b": "null", "on": "True", "items": "[1, 2]", "text": "4", "other": "5"}
    body = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    expected = {"a": 3, "b": None, "on": True, "items": [1, 2], "text": "4", "other": "5"}
    assert read(f"<function=add>\n{body}</function>", "xml", tools=[ADD])[1] == [("call_0", "add", expected)]
    wrong = "<function=add><parameter=a>three</parameter><parameter=items>[1] 2</parameter></function>"
    assert read(wrong, "xml", tools=[ADD])[1][0][2] == {"a": "three", "items": "[1] 2"}
    broken_schema = environment_pb.Tool(name="add", parameters_json="[")
    assert read("<function=add><parameter=a>3</parameter></function>", "xml", tools=[broken_schema])[1][0][2] == {
        "a": "3"
    }


@pytest.mark.parametrize("parser", GRAMMARS)
def test_thinking_is_apart_from_the_content(parser):
    call = say(parser, "x")
    for text in (f"<think>I {call}</think>\n\nSo: {call}", f"\n<think>\nI {call}\n</think>So: {call}"):
        action = parse(text, parser)
        assert (action.message.content, len(action.message.tool_calls)) == ("So:", 1)
        assert action.message.thinking == f"I {call}"
    assert parse("I think\n</think>\n\nfour", parser).message.content == "four"  # the template opened it
    unfinished = parse(f"<think>I {call}", parser)
    assert (unfinished.message.content, len(unfinished.message.tool_calls)) == ("", 0)
    within = parse(say(parser, "a </think> b"), parser)
    assert json.loads(within.message.tool_calls[0].arguments_json) == {"text": "a </think> b"}
    assert parse("<think>a</think>b", parser, thinking="content").message.content == "<think>a</think>b"


@pytest.mark.parametrize("parser", GRAMMARS)
def test_a_megabyte_ends(parser):
    pieces = ["[f(", "[f()]", "<function=f><parameter=a>", "</parameter>x", "<function=f>", "<|python_tag|>{", "{", '"']
    for piece in (*pieces, SAY[parser], SAY[parser][:-3]):
        parse(piece * (1_000_000 // len(piece)), parser)
