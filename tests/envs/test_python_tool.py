"""services.envs.python_tool: code runs in a sandbox that keeps its variables; only the right answer earns."""

import json

import grpc
import pytest

from headrace.v1 import environment_service_pb2 as pb
from headrace.v1 import trajectory_pb2
from services.envs import catalog
from services.envs.environment import ToolCall, assistant
from services.envs.python_tool import KINDS, PythonTool, failure, is_right
from services.envs.sandbox.sandbox import Ending, Outcome
from tests.envs.conversation import DEMONSTRATION, Conversation, answer, play, reset, say, serving
from tests.envs.sandbox.strengths import kill_jails, namespaces_allowed

MONTY = {"strength": "monty"}
STRENGTHS = [
    "monty",
    pytest.param("process", marks=pytest.mark.skipif(not namespaces_allowed(), reason="no user namespaces")),
]


def calls(*sources: str) -> pb.InteractRequest:
    """An action that calls the tool with each source."""
    made = [
        ToolCall(id=f"call_{number}", name="python", arguments_json=json.dumps({"code": source}))
        for number, source in enumerate(sources)
    ]
    return answer(assistant("", *made))


def serve(**options):
    return serving({"python_tool": catalog.find("python_tool", {"sandbox": MONTY, **options})})


@pytest.mark.parametrize("strength", STRENGTHS)
async def test_the_expert_earns_1_and_a_wrong_answer_0(strength):
    async with serve(sandbox={"strength": strength}) as (stub, _):
        for seed in range(12):
            request = reset("python_tool", index=seed, seed=seed, purpose=DEMONSTRATION)
            responses = await play(stub, request, lambda response: answer(response.demonstration))
            assert responses[-1].reward == 1.0 and len(responses) == 3
            assert dict(responses[-1].metrics) == {"calls": 1, "failed_calls": 0}
            right = responses[1].demonstration.content
            responses = await play(stub, reset("python_tool", index=seed, seed=seed), lambda _, right=right: say(right))
            assert responses[-1].reward == 1.0  # without the tool, too
            wrong = f"{right}1"
            responses = await play(stub, reset("python_tool", index=seed, seed=seed), lambda _, wrong=wrong: say(wrong))
            assert responses[-1].reward == 0.0 and responses[-1].terminated


@pytest.mark.parametrize("strength", STRENGTHS)
async def test_state_is_kept_within_an_episode_and_nowhere_else(strength):
    async with serve(sandbox={"strength": strength}) as (stub, _):
        first, second = Conversation(stub), Conversation(stub)
        for conversation in (first, second):
            await conversation.send(reset("python_tool"))
        assert [m.content for m in (await first.send(calls("x = 6"))).messages] == [""]
        assert [m.content for m in (await first.send(calls("print(7 * x)"))).messages] == ["42"]
        lost = (await second.send(calls("print(x)"))).messages[0].content
        assert lost.startswith("error:") and "NameError" in lost


async def test_calls_of_one_turn_run_one_after_the_other():
    async with serve() as (stub, _):
        conversation = Conversation(stub)
        await conversation.send(reset("python_tool"))
        response = await conversation.send(calls("x = []", "x.append(1)\nprint(x)", "x.append(2)\nprint(x)"))
        assert [message.content for message in response.messages] == ["", "[1]", "[1, 2]"]
        assert [message.tool_call_id for message in response.messages] == ["call_0", "call_1", "call_2"]


async def test_what_fails_is_told():
    async with serve(deadline_s=2, turns=9) as (stub, _):
        conversation = Conversation(stub)
        await conversation.send(reset("python_tool"))
        for source, told in [
            ("print('so far')\n1 / 0", "so far\nTraceback"),
            ("while True: pass", "stopped after 2 s\n(the interpreter was started again"),
            ("x =", "error:"),
            ("while True: print('x' * 999)", "printed too much"),
        ]:
            response = await conversation.send(calls(source))
            assert told in response.messages[0].content and not response.terminated
        response = await conversation.send(answer(assistant("", ToolCall(id="a", name="bash", arguments_json="{}"))))
        assert response.messages[0].content.startswith("error: no tool 'bash'")
        assert response.metrics["failed_calls"] == response.metrics["calls"] == 5


async def test_a_terse_one_says_error():
    async with serve(terse=True) as (stub, _):
        conversation = Conversation(stub)
        await conversation.send(reset("python_tool"))
        response = await conversation.send(calls("1 / 0", "print(1)"))
        assert [message.content for message in response.messages] == ["error", "1"]
        response = await conversation.send(say("", malformed_tool_calls=["not JSON"]))
        assert [message.content for message in response.messages] == ["error"]


async def test_turns_used_up_end_with_reward_0():
    async with serve(turns=2) as (stub, _):
        responses = await play(stub, reset("python_tool"), lambda _: calls("print(1)"))
        assert len(responses) == 3 and responses[-1].reward == 0.0 and responses[-1].terminated


@pytest.mark.parametrize(
    ("text", "right", "reward"),
    [
        ("42", 42, True),
        ("The answer is 42.", 42, True),
        ("42.0", 42, True),
        ("4.2e1", 42, True),
        ("41.99999999999999999999", 42, False),
        ("42 or 43", 42, False),
        ("-42", 42, False),
        ("", 42, False),
        ("9" * 5000, 42, False),
        ("1e99", 42, False),
        ("6*7", 42, False),
        ("__import__('os').system('touch canary')", 42, False),
        ("٤٢", 42, True),
        ("cba", "cba", True),
        ("It is 'cba'.", "cba", True),
        ("cba indeed", "cba", False),
        ("'abc'[::-1]", "cba", False),
        ("", "cba", False),
    ],
)
def test_only_the_right_answer_counts(text, right, reward):
    assert is_right(text, right) is reward


async def test_tasks_are_drawn_from_seed_and_split():
    async def questions(split: str) -> list[str]:
        found = []
        for seed in range(300):
            environment = PythonTool(sandbox=MONTY)
            first = await environment.reset(trajectory_pb2.Task(seed=seed, split=split))
            found.append(first.messages[-1].content)
        return found

    train, test = await questions("train"), await questions("test")
    assert train == await questions("train")
    assert len(set(train)) > 250 and not set(train) & set(test)
    assert all(any(word in question for question in train) for word in ("(", "length", "count", "reverse", "max of"))


def test_options_that_make_no_task_are_refused():
    for options in (
        {"kinds": []},
        {"kinds": ["poetry"]},
        {"digits": 9},
        {"length": 1},
        {"turns": 0},
        {"deadline_s": 0},
    ):
        with pytest.raises(ValueError, match="must be"):
            PythonTool(sandbox=MONTY, **options)
    assert set(KINDS) == {"arithmetic", "text", "list"}


@pytest.mark.skipif(not namespaces_allowed(), reason="no user namespaces")
async def test_a_sandbox_that_dies_costs_the_episode_and_no_reward():
    async with serve(sandbox={"strength": "process", "max_open": 1}) as (stub, _):
        conversation = Conversation(stub)
        await conversation.send(reset("python_tool"))
        await conversation.send(calls("x = 1"))
        await kill_jails()
        code, details = await conversation.refusal(calls("print(x)"))
        assert code == grpc.StatusCode.INTERNAL and "SandboxError" in details
        other = Conversation(stub)
        await other.send(reset("python_tool"))
        assert (await other.send(calls("print(1)"))).messages[0].content == "1"


@pytest.mark.parametrize("ending", Ending)
def test_every_ending_is_told(ending):
    outcome = Outcome("so far\n", "", None, ending, state_lost=ending is not Ending.EXITED)
    told = failure(outcome, 5)
    assert told.startswith("so far\nthe ")
    # A sandbox that is gone stays gone.
    assert ("started again" in told) == (ending not in (Ending.EXITED, Ending.LOST))
