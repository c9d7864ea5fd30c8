"""What every environment of the catalog must hold, over gRPC. To check one's own, add it to the cases."""

import contextlib

import grpc
import pytest

from headrace.v1 import environment_service_pb2 as pb
from headrace.v1 import environment_service_pb2_grpc as pb_grpc
from services.envs import catalog
from tests.envs.conversation import DEMONSTRATION, Conversation, answer, play, reset, say, serving

CASES = {
    "guess_number": ("guess_number", {}),
    "guess_number_blind": ("guess_number", {"feedback": "blind"}),
    "calculator": ("calculator", {}),
    "gymnasium": ("gymnasium", {"arguments": {"max_episode_steps": 6}}),
    "textarena": ("textarena", {}),
    "judge": ("judge", {"tasks": [{"prompt": "2 + 2?", "expected": "4"}]}),
    "python_tool": ("python_tool", {"sandbox": {"strength": "monty"}}),
    "latency": ("benchmarks.latency_environment:Latency", {"mean_s": 0.001}),
}
EXPERTS = ["guess_number", "calculator", "python_tool"]
REPRODUCIBLE = ["guess_number", "guess_number_blind", "calculator", "gymnasium", "textarena", "python_tool"]


@contextlib.asynccontextmanager
async def served(name: str):
    implementation, options = CASES[name]
    async with serving({name: catalog.find(implementation, options)}) as (stub, _):
        yield stub


async def offer(stub: pb_grpc.EnvironmentServiceStub) -> pb.EnvironmentInfo:
    return (await stub.ListEnvironments(pb.ListEnvironmentsRequest())).environments[0]


@pytest.mark.parametrize("name", CASES)
async def test_it_describes_itself(name):
    async with served(name) as stub:
        info = await offer(stub)
    assert info.name == name and info.description.endswith(".") and info.splits
    assert all(split.task_count >= 0 for split in info.splits)


@pytest.mark.parametrize("name", CASES)
async def test_any_policy_reaches_an_end_with_a_reward(name):
    replies = iter(["", "\0", "🙂" * 100, "4", "x" * 100_000, "<tool_call>", *["4"] * 100])
    async with served(name) as stub:
        for split in (await offer(stub)).splits:
            responses = await play(
                stub, reset(name, split=split.name, index=2**40, seed=2**64 - 1), lambda _: say(next(replies))
            )
            assert responses[0].messages and any(response.HasField("reward") for response in responses)


@pytest.mark.parametrize("name", CASES)
async def test_malformed_calls_are_answered(name):
    async with served(name) as stub:
        conversation = Conversation(stub)
        await conversation.send(reset(name))
        response = await conversation.send(say("", malformed_tool_calls=["not JSON", '"name" must be a string']))
        assert response.messages and not response.truncated


@pytest.mark.parametrize("name", REPRODUCIBLE)
async def test_the_same_task_and_seed_give_the_same_episode(name):
    replies = ["1", "8", "2", "7", "3", "6"]
    async with served(name) as stub:

        async def episode(seed: int) -> list[pb.InteractResponse]:
            said = iter(replies)
            return await play(stub, reset(name, index=4, seed=seed), lambda _: say(next(said)))

        assert [await episode(seed) for seed in range(5)] == [await episode(seed) for seed in range(5)]


@pytest.mark.parametrize("name", EXPERTS)
async def test_its_expert_earns_1(name):
    async with served(name) as stub:
        for seed in range(16):
            request = reset(name, index=seed, seed=seed, purpose=DEMONSTRATION)
            responses = await play(stub, request, lambda response: answer(response.demonstration))
            assert responses[-1].reward == 1.0 and not responses[-1].HasField("demonstration")
            assert all(response.demonstration.role == "assistant" for response in responses[:-1])


@pytest.mark.parametrize("name", sorted(set(CASES) - set(EXPERTS)))
async def test_without_an_expert_a_demonstration_is_refused(name):
    async with served(name) as stub:
        code, details = await Conversation(stub).refusal(reset(name, purpose=DEMONSTRATION))
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "no expert" in details


@pytest.mark.parametrize("name", EXPERTS)
async def test_a_policy_under_training_sees_no_demonstration(name):
    async with served(name) as stub:
        assert not (await Conversation(stub).send(reset(name))).HasField("demonstration")
