"""services.envs.http_tool: endpoints as tools, through a real server and a real service."""

import functools
import json

import grpc
import pytest
from aiohttp import web

from headrace.v1 import trajectory_pb2
from services.envs.http_tool import HttpTools
from tests.envs.conversation import Conversation, answer, reset, say, serving
from tests.envs.web_service import web_service

TASKS = [{"prompt": "What is 2 + 3?", "expected": "5"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


def adder(number: int, asked: dict) -> web.Response:
    given = asked["body"] or {name: int(value) for name, value in asked["query"].items()}
    if "a" not in given:
        return web.Response(status=422, text="a is missing")
    return web.Response(text=str(given["a"] + given["b"]))


def served(url: str, *, method: str = "POST", repeatable: bool = True, **options):
    tool = {"name": "add", "description": "Adds.", "url": f"{url}/add", "parameters": SCHEMA, "method": method}
    tool["repeatable"] = repeatable
    options = {"tasks": TASKS, "timeout_s": 20, "attempts": 2, **options}
    return serving({"sums": functools.partial(HttpTools, tools=[tool], **options)})


def call(arguments: object, name: str = "add", id: str = "call_0") -> trajectory_pb2.ToolCall:
    return trajectory_pb2.ToolCall(id=id, name=name, arguments_json=json.dumps(arguments))


def ask(*calls: trajectory_pb2.ToolCall, **fields):
    return answer(trajectory_pb2.Message(role="assistant", tool_calls=calls), **fields)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_who_calls_and_answers_right_earns_1_and_wrong_0(method):
    async with web_service(adder) as service, served(service.url, method=method) as (stub, _):
        for text, reward in [("5", 1.0), ("6", 0.0)]:
            conversation = Conversation(stub)
            first = await conversation.send(reset("sums"))
            assert [(tool.name, json.loads(tool.parameters_json)) for tool in first.tools] == [("add", SCHEMA)]
            answers = await conversation.send(ask(call({"a": 2, "b": 3}), call({"a": 1, "b": 1}, id="call_1")))
            assert [(m.tool_call_id, m.content) for m in answers.messages] == [("call_0", "5"), ("call_1", "2")]
            last = await conversation.send(say(text))
            assert (last.reward, last.terminated) == (reward, True)
            assert last.metrics == {"calls": 2.0, "failed_calls": 0.0}


async def test_the_policy_s_mistakes_are_answered():
    async with web_service(adder) as service, served(service.url, max_characters=4) as (stub, _):
        conversation = Conversation(stub)
        await conversation.send(reset("sums"))
        answers = await conversation.send(
            ask(call({}), call({}, name="sub"), call([1]), malformed_tool_calls=["not JSON"])
        )
        assert [m.content for m in answers.messages] == [
            "error: status 422: a is",
            "error: no tool 'sub', but add",
            "error: the arguments must be a JSON object",
            "error: not JSON",
        ]
        assert not answers.terminated and not answers.HasField("reward")


@pytest.mark.parametrize("kind", ["broken", "hang", "cut"])
async def test_a_service_that_is_down_is_no_reward_but_a_failed_episode(kind):
    def answered(number: int, asked: dict):
        return web.Response(status=503, text="down") if kind == "broken" else kind

    async with (
        web_service(answered) as service,
        served(service.url, timeout_s=0.2 if kind == "hang" else 20) as (stub, _),
    ):
        code, details = await Conversation(stub).refusal(reset("sums"), ask(call({"a": 2, "b": 3})))
    assert code == grpc.StatusCode.INTERNAL and "Unreachable" in details and len(service.requests) == 2


async def test_a_service_that_recovers_costs_nothing():
    async with (
        web_service(lambda number, asked: "cut" if number == 0 else adder(number, asked)) as service,
        served(service.url) as (stub, _),
    ):
        conversation = Conversation(stub)
        await conversation.send(reset("sums"))
        assert (await conversation.send(ask(call({"a": 2, "b": 3})))).messages[0].content == "5"


@pytest.mark.parametrize("kind", ["cut", "hang", 500, 502, 504])
@pytest.mark.parametrize(("method", "repeatable", "sent"), [("POST", False, 1), ("GET", False, 2)])
async def test_what_may_have_been_carried_out_is_sent_again_only_if_that_does_no_harm(kind, method, repeatable, sent):
    def answered(number: int, asked: dict):
        return web.Response(status=kind, text="broken") if isinstance(kind, int) else kind

    options = {"method": method, "repeatable": repeatable, "timeout_s": 0.5 if kind == "hang" else 20}
    async with web_service(answered) as service, served(service.url, **options) as (stub, _):
        code, details = await Conversation(stub).refusal(reset("sums"), ask(call({"a": 2, "b": 3})))
    assert code == grpc.StatusCode.INTERNAL and "Unreachable" in details
    # Of a GET whose connection is cut the HTTP library sends another by itself.
    assert len(service.requests) == 1 if sent == 1 else len(service.requests) >= sent
    assert ("it may have been carried out" in details) == (sent == 1)


async def test_a_post_that_was_not_carried_out_is_sent_again():
    busy = web.Response(status=503, text="busy")
    async with (
        web_service(lambda number, asked: busy if number == 0 else adder(number, asked)) as service,
        served(service.url, repeatable=False) as (stub, _),
    ):
        conversation = Conversation(stub)
        await conversation.send(reset("sums"))
        assert (await conversation.send(ask(call({"a": 2, "b": 3})))).messages[0].content == "5"


async def test_turns_used_up_end_with_reward_0():
    async with web_service(adder) as service, served(service.url, turns=1) as (stub, _):
        conversation = Conversation(stub)
        await conversation.send(reset("sums"))
        last = await conversation.send(ask(call({"a": 2, "b": 3})))
    assert (last.terminated, last.reward) == (True, 0.0)


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([], "at least one"),
        ([{"name": "a", "description": "", "url": "http://x"}] * 2, "each name once"),
        ([{"name": "a", "description": "", "url": "file:///etc/passwd"}], "begin with http"),
        ([{"name": "a", "description": "", "url": "http://x", "method": "PUT"}], "GET or POST"),
    ],
)
def test_what_makes_no_tools_is_refused(tools, says):
    with pytest.raises(ValueError, match=says):
        HttpTools(tools=tools, tasks=TASKS)
