"""services.envs.server: one stream is one episode, each request has one answer, and every end closes once."""

import asyncio
import functools

import grpc
import pytest

from headrace.v1 import environment_service_pb2 as pb
from services.envs import contract
from services.envs.environment import Environment, Task, TimeStep, user
from services.envs.guess_number import GuessNumber
from tests.envs import faulty
from tests.envs.conversation import DEMONSTRATION, Conversation, play, reset, say, serving

OUT_OF_ORDER, INTERNAL = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INTERNAL


class Watched(Environment):
    """Writes down its life.

    It goes on for ever; the word "hang" hangs it, "end" ends it, "raise" makes it raise.
    """

    def __init__(self, life: list[str]):
        self._life = life

    async def reset(self, task: Task) -> TimeStep:
        self._life.append("reset")
        return TimeStep([user("go")])

    async def step(self, action) -> TimeStep:
        word = action.message.content
        self._life.append(word)
        if word == "raise":
            raise KeyError("no such\ndoor")
        if word == "hang":
            await asyncio.Event().wait()
        if word == "end":
            return TimeStep(reward=0.0, terminated=True)
        return TimeStep([user("go on")], reward=0.5)

    async def close(self) -> None:
        self._life.append("close")
        await asyncio.sleep(0.01)
        self._life.append("closed")


async def until(life: list[str], last: str) -> None:
    async with asyncio.timeout(10):
        while not life or life[-1] != last:  # noqa: ASYNC110 - the environment cannot tell
            await asyncio.sleep(0.005)


@pytest.fixture
async def watched():
    life: list[str] = []
    async with serving({"watched": functools.partial(Watched, life)}) as (stub, _):
        yield Conversation(stub), life


async def test_an_episode_has_one_answer_to_each_request(watched):
    conversation, life = watched
    first = await conversation.send(reset("watched"))
    assert [message.content for message in first.messages] == ["go"] and not first.HasField("reward")
    middle = await conversation.send(say("walk"))
    assert middle.reward == 0.5 and not middle.terminated
    last = await conversation.send(say("end"))
    assert last.HasField("reward") and last.reward == 0.0 and last.terminated
    await until(life, "closed")
    assert life == ["reset", "walk", "end", "close", "closed"]
    assert await conversation.end() == (grpc.StatusCode.OK, "")


async def test_half_closing_closes(watched):
    conversation, life = watched
    await conversation.send(reset("watched"))
    assert await conversation.end() == (grpc.StatusCode.OK, "")
    await until(life, "closed")
    assert life == ["reset", "close", "closed"]


@pytest.mark.parametrize("word", ["walk", "hang"])
async def test_cancelling_closes(watched, word):
    conversation, life = watched
    await conversation.send(reset("watched"))
    await conversation.call.write(say(word))
    await until(life, word)
    conversation.call.cancel()
    await until(life, "closed")
    assert life == ["reset", word, "close", "closed"]


async def test_a_raise_is_told_in_one_line_and_closes(watched):
    conversation, life = watched
    assert await conversation.refusal(reset("watched"), say("raise")) == (
        INTERNAL,
        "step raised KeyError: 'no such\\ndoor'",
    )
    await until(life, "closed")
    assert life == ["reset", "raise", "close", "closed"]


async def test_shutdown_closes_what_is_left():
    life: list[str] = []
    async with serving({"watched": functools.partial(Watched, life)}) as (stub, _):
        conversations = [Conversation(stub) for _ in range(3)]
        for conversation in conversations:
            await conversation.send(reset("watched"))
        await conversations[0].call.write(say("hang"))
        await until(life, "hang")
    assert sorted(life) == sorted([*["reset", "close", "closed"] * 3, "hang"])


async def test_a_close_that_hangs_or_raises_costs_nothing_else():
    offers = {
        "hangs": functools.partial(faulty.Hangs, when="close"),
        "raises": functools.partial(faulty.Raises, when="close"),
    }
    async with serving(offers, capacity=1, close_timeout_s=0.1) as (stub, servicer):
        for name in ("hangs", "raises", "hangs"):
            await play(stub, reset(name), lambda response: say())
            await servicer.closed()


@pytest.mark.parametrize(
    ("requests", "code", "text"),
    [
        ([say()], OUT_OF_ORDER, "must reset"),
        ([pb.InteractRequest()], OUT_OF_ORDER, "must reset"),
        ([reset("watched"), reset("watched")], OUT_OF_ORDER, "open another"),
        ([reset("watched"), pb.InteractRequest()], grpc.StatusCode.INVALID_ARGUMENT, "empty"),
        ([reset("watched"), say("end"), say("again")], OUT_OF_ORDER, "has ended"),
        ([reset("watched"), say("end"), reset("watched")], OUT_OF_ORDER, "open another"),
        ([reset("nobody")], grpc.StatusCode.NOT_FOUND, "no environment 'nobody' here, but watched"),
        ([reset("watched", split="test")], grpc.StatusCode.NOT_FOUND, "no split 'test' of watched, but train"),
        ([reset("watched", purpose=0)], grpc.StatusCode.INVALID_ARGUMENT, "purpose"),
        ([reset("watched", index=-1)], grpc.StatusCode.INVALID_ARGUMENT, "index"),
        ([reset("watched", purpose=DEMONSTRATION)], OUT_OF_ORDER, "Watched has no expert"),
    ],
)
async def test_what_is_out_of_order_is_refused(watched, requests, code, text):
    conversation, life = watched
    refused, details = await conversation.refusal(*requests)
    assert refused == code and text in details
    if "reset" in life:
        await until(life, "closed")
        assert life.count("close") == 1


async def test_a_stream_without_a_word_ends_well(watched):
    conversation, life = watched
    assert await conversation.end() == (grpc.StatusCode.OK, "")
    assert not life


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (faulty.Raises, "{when} raised RuntimeError: the simulator is out of fuel"),
        (faulty.Exits, "{when} raised SystemExit: 3"),
        (faulty.AwaitsCancelled, "{when} raised CancelledError: the simulator's"),
        (faulty.Garbage, "{when} returned dict, not a TimeStep"),
        (faulty.Silent, "{when} left the episode open without a message to answer"),
        (faulty.InfiniteMetric, "{when} gave the metric turn inf, not a finite number"),
    ],
)
@pytest.mark.parametrize("when", ["reset", "step"])
async def test_a_broken_environment_costs_its_episode_and_says_why(broken, text, when):
    offers = {"broken": functools.partial(broken, when=when), "sound": faulty.Sound}
    async with serving(offers) as (stub, _):
        requests = [reset("broken")] if when == "reset" else [reset("broken"), say()]
        assert await Conversation(stub).refusal(*requests) == (INTERNAL, text.format(when=when))
        assert (await play(stub, reset("sound", index=1), lambda response: say()))[-1].reward == 1


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (faulty.NaNReward, "step gave the reward nan, not a finite number"),
        (faulty.NoReward, "step ended the episode, in which no reward was given"),
    ],
)
async def test_a_reward_that_is_none_never_counts_as_zero(broken, text):
    async with serving({"broken": broken}) as (stub, _):
        assert await Conversation(stub).refusal(reset("broken"), say()) == (INTERNAL, text)


async def test_capacity_is_refused_and_comes_back():
    async with serving({"sound": faulty.Sound}, capacity=2) as (stub, _):
        held = [Conversation(stub) for _ in range(2)]
        for conversation in held:
            await conversation.send(reset("sound"))
        code, details = await Conversation(stub).refusal(reset("sound"))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "another replica" in details
        held[0].call.cancel()
        async with asyncio.timeout(10):
            while True:
                again = Conversation(stub)
                try:
                    await again.send(reset("sound"))
                    break
                except grpc.aio.AioRpcError as error:
                    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_2000_episodes_start_at_once():
    async with serving({"guess": GuessNumber}) as (stub, _):

        async def start() -> Conversation:
            conversation = Conversation(stub)
            await conversation.send(reset("guess"))
            return conversation

        conversations = await asyncio.gather(*(start() for _ in range(2_000)))
        ends = await asyncio.gather(*(conversation.end() for conversation in conversations))
        assert {code for code, _ in ends} == {grpc.StatusCode.OK}


async def test_500_episodes_at_once_are_apart():
    async with serving({"guess": GuessNumber}) as (stub, _):

        async def episode(number: int) -> tuple[int, int]:
            secret = number % 8 + 1
            conversation = Conversation(stub)
            await conversation.send(reset("guess", index=number))
            answers = [(await conversation.send(say(str(guess)))).messages[0].content for guess in (1, 8)]
            expected = ["found" if secret == 1 else "higher"], ["found" if secret == 8 else "lower"]
            return number, int(answers == [*expected[0], *expected[1]])

        inside = [number for number in range(500) if number % 8 not in (0, 7)]
        assert await asyncio.gather(*map(episode, inside)) == [(number, 1) for number in inside]


async def test_it_tells_what_it_offers():
    async with serving({"guess": GuessNumber, "broken": faulty.Raises}) as (stub, _):
        offers = (await stub.ListEnvironments(pb.ListEnvironmentsRequest())).environments
    assert [offer.name for offer in offers] == ["broken", "guess"]
    assert offers[0].description == "Raises in reset, step, end or close."
    assert [(split.name, split.task_count) for split in offers[0].splits] == [("test", 8), ("train", 0)]
    assert list(offers[1].metric_names) == ["guesses", "invalid_guesses"]


def test_pieces_of_the_contract_that_no_faulty_environment_breaks():
    open_step = TimeStep([user("a")])
    for step, text in [
        (TimeStep(reward=1.0, terminated=True, truncated=True), "both terminated and truncated"),
        (TimeStep([user("a")], tools=[pb.Tool(name="t")]), "tools, which belong to the reset"),
        (TimeStep([user("a")], metrics={"b": 1.0}), "'b', which metric_names does not list"),
        (TimeStep([user("a")], reward="1"), "'1', not a finite number"),
        (TimeStep([user("a")], reward=10**400), "wrong type"),
        (TimeStep([user("a")], metrics=None), "wrong type"),
        (TimeStep(["a"]), "wrong type"),
        (TimeStep([pb.Action().message]), "role ''"),
    ]:
        with pytest.raises(contract.ContractError, match=text):
            contract.response(step, after_reset=False, rewarded=False, metric_names=["a"])
    with pytest.raises(contract.ContractError, match="before there was an action"):
        contract.response(TimeStep([user("a")], reward=0.0), after_reset=True, rewarded=False, metric_names=[])
    assert contract.response(TimeStep(truncated=True), after_reset=False, rewarded=True, metric_names=[]).truncated
    assert contract.response(open_step, after_reset=True, rewarded=False, metric_names=[]).messages
