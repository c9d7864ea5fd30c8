"""services.rollout.openai_messages: OpenAI's bodies in, OpenAI's bodies out."""

import pytest

from headrace.v1 import environment_service_pb2 as environment_pb
from headrace.v1 import trajectory_pb2 as pb
from services.rollout.openai_messages import BadRequest, chunks, read, reply
from services.rollout.sessions import Completion

PNG = "data:image/png;base64,iVBORw0KGgo="
HEAD = {"reply_id": "chatcmpl-1", "created": 7, "model": "m"}
ANSWER = Completion(
    pb.Message(
        role="assistant",
        content="So:",
        thinking="hm",
        tool_calls=[pb.ToolCall(id=f"call_{n}", name="f", arguments_json=f'{{"a": {n}}}') for n in range(2)],
    ),
    "tool_calls",
    prompt_tokens=10,
    completion_tokens=4,
)


def test_messages_and_tools_are_read():
    body = {
        "messages": [
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": PNG}}],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "call_0", "content": "4"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto",
        "temperature": 0,
        "stream": True,
    }
    messages, tools, ignored = read(body)
    assert messages == [
        pb.Message(role="system", content="be brief"),
        pb.Message(role="user", content="see ", images=[pb.Image(data=b"\x89PNG\r\n\x1a\n", mime_type="image/png")]),
        pb.Message(role="assistant", tool_calls=[pb.ToolCall(id="call_0", name="f", arguments_json="{}")]),
        pb.Message(role="tool", tool_call_id="call_0", content="4"),
    ]
    assert tools == [environment_pb.Tool(name="f", parameters_json='{"type": "object"}')]
    assert ignored == ["temperature"]


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        {"messages": "a"},
        {"messages": [1]},
        {"messages": [{"content": "a"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{}]}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
        {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:a;base64,?"}}]}]},
    ],
)
def test_what_is_no_request_is_refused(body):
    with pytest.raises(BadRequest):
        read(body)


def test_a_reply_and_its_stream_say_the_same():
    body = reply(ANSWER, **HEAD)
    message = body["choices"][0]["message"]
    assert message["content"] == "So:" and message["reasoning_content"] == "hm"
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"a": 0}', '{"a": 1}']
    assert body["usage"] == {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}
    events = list(chunks(ANSWER, include_usage=True, **HEAD))
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": "So:"}
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call.pop("index") for call in calls] == [0, 1] and calls == message["tool_calls"]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls" and events[-1]["usage"] == body["usage"]
    assert {event["id"] for event in events} == {"chatcmpl-1"}


def test_our_own_answer_is_read_back_as_it_was():
    message = reply(ANSWER, **HEAD)["choices"][0]["message"]
    assert read({"messages": [message]})[0][0].tool_calls == ANSWER.message.tool_calls
