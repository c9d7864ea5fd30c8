"""services.envs.customer_service: tau2's tasks with a scripted customer, through a real server.

tau2 brings 600 MB of packages that nothing else here needs, so it has an environment of its own: `make test-tau2`.
"""

import functools
import json

import pytest

pytest.importorskip("tau2", reason="`make test-tau2` installs tau2 and runs these")

from headrace.v1 import trajectory_pb2
from services.envs.customer_service import AGREES, CustomerService, scenarios
from tests.envs.conversation import DEMONSTRATION, Conversation, answer, play, reset, say, serving


def served(**options):
    return serving({"desk": functools.partial(CustomerService, **options)})


def calling(*calls: tuple[str, dict], content: str = "", **fields):
    made = [
        trajectory_pb2.ToolCall(id=f"call_{n}", name=name, arguments_json=json.dumps(arguments))
        for n, (name, arguments) in enumerate(calls)
    ]
    return answer(trajectory_pb2.Message(role="assistant", content=content, tool_calls=made), **fields)


END = ("end_conversation", {})


async def expert(stub, index: int) -> list:
    request = reset("desk", index=index, purpose=DEMONSTRATION)
    return await play(stub, request, lambda response: answer(response.demonstration))


@pytest.mark.parametrize("domain", ["mock", "retail", "airline"])
async def test_the_right_actions_earn_1_in_every_task(domain):
    async with served(domain=domain) as (stub, _):
        members = scenarios(domain)["train"]
        told = [n for n, scenario in enumerate(members) if scenario.evaluation_criteria.actions is not None]
        assert len(told) >= len(members) - 1
        for index in told[:: 1 if domain == "mock" else 9]:
            responses = await expert(stub, index)
            assert responses[-1].reward == 1.0 and responses[-1].terminated, (domain, index)
            assert responses[-1].metrics["database_right"] == 1.0
            assert responses[0].messages[0].role == "system" and len(responses[0].tools) > 2


async def test_who_does_nothing_or_something_wrong_earns_0():
    async with served(domain="mock") as (stub, _):
        nothing = await play(stub, reset("desk"), lambda _: calling(END))
        assert nothing[-1].reward == 0.0 and nothing[-1].metrics["database_right"] == 0.0
        wrong = ("create_task", {"user_id": "user_1", "title": "Unimportant"})
        other = await play(stub, reset("desk"), lambda _: calling(wrong, END))
        assert other[-1].reward == 0.0
        right = ("create_task", {"user_id": "user_1", "title": "Important Meeting"})
        assert (await play(stub, reset("desk"), lambda _: calling(right, END)))[-1].reward == 1.0
        # What comes after the end comes too late.
        assert (await play(stub, reset("desk"), lambda _: calling(END, right)))[-1].reward == 0.0


@pytest.mark.parametrize("index", range(8))
async def test_idleness_is_judged_in_every_task(index):
    async with served(domain="mock") as (stub, _):
        responses = await play(stub, reset("desk", index=index), lambda _: calling(END))
    assert responses[-1].HasField("reward") and responses[-1].reward in (0.0, 1.0)


async def test_the_customer_tells_what_it_wants_agrees_and_leaves():
    async with served(agreements=2) as (stub, _):
        responses = await play(stub, reset("desk"), lambda _: say("What else?"))
    said = [response.messages[-1].content for response in responses[:-1]]
    assert said[0].startswith("This is my request") and said[2:] == [AGREES, AGREES] and len(responses) == 5
    assert responses[-1].terminated and responses[-1].reward == 0.0


async def test_mistakes_are_answered_and_turns_used_up_earn_0():
    async with served(turns=2) as (stub, _):
        conversation = Conversation(stub)
        await conversation.send(reset("desk"))
        calls = [("calculate", {"expression": "9**9**9**9"}), ("get_user_details", {"user_id": "nobody"}), ("sing", {})]
        more = [("calculate", {}), ("get_user_details", {"colour": 1}), ("calculate", {"expression": "1.5*2"})]
        request = calling(*calls, *more, malformed_tool_calls=["not JSON"])
        answers = [message.content for message in (await conversation.send(request)).messages]
        assert all(text.startswith("error: ") for text in answers[:5] + answers[6:]) and answers[5] == "3.0"
        last = await conversation.send(calling(calls[0]))
    assert last.terminated and last.HasField("reward") and last.reward == 0.0


async def test_the_same_task_is_the_same_conversation_and_databases_are_apart():
    async with served(domain="mock") as (stub, _):
        episodes = [await expert(stub, index) for index in (0, 0, 3)]
    assert episodes[0] == episodes[1] != episodes[2]


@pytest.mark.parametrize("options", [{"domain": "bank"}, {"turns": 0}, {"agreements": -1}])
def test_options_that_make_no_task_are_refused(options):
    with pytest.raises(ValueError, match="domain must be one of"):
        CustomerService(**options)
