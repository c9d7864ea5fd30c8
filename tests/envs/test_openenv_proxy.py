"""services.envs.openenv_proxy: a real WebSocket server that keeps OpenEnv's protocol, and ones that break it."""

import asyncio
import contextlib
import functools
import json
import random

import grpc
import pytest
from websockets.asyncio.server import serve

from services.envs.openenv_proxy import OpenEnv
from tests.envs.conversation import Conversation, play, reset, say, serving


def observation(seen: dict, reward: object = None, done: bool = False, **more) -> str:
    return json.dumps({"type": "observation", "data": {"observation": seen, "reward": reward, "done": done, **more}})


def error(code: str, message: str = "no", **more) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


class Guessing:
    """A number from 1 to 7 in 3 guesses, as an OpenEnv server plays it: one game for each connection."""

    def __init__(self, places: int = 100):
        self.places, self.open, self.closed = places, 0, 0

    async def __call__(self, socket) -> None:
        if self.open >= self.places:
            await socket.send(error("CAPACITY_REACHED"))
            return
        self.open += 1
        try:
            await self._play(socket)
        finally:
            self.open -= 1
            self.closed += 1

    async def _play(self, socket) -> None:
        guesses = 0
        async for text in socket:
            message = json.loads(text)
            if message["type"] == "reset":
                secret = random.Random(message["data"]["seed"]).randint(1, 7)
                await socket.send(observation({"text": "1 to 7", "done": False, "reward": None, "metadata": {}}))
            elif not isinstance(message["data"].get("guess"), int):
                wrong = [{"loc": ["guess"], "msg": "a whole number is needed"}]
                await socket.send(error("VALIDATION_ERROR", "Invalid message", errors=wrong))
            else:
                guesses += 1
                guess = message["data"]["guess"]
                hint = "found" if guess == secret else "higher" if guess < secret else "lower"
                done = hint == "found" or guesses == 3
                await socket.send(observation({"text": hint}, float(hint == "found") if done else None, done))


@contextlib.asynccontextmanager
async def played(handler, **options):
    """A stub for OpenEnv in front of a server with this handler."""
    async with serve(handler, "127.0.0.1", 0) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/ws"
        async with serving({"game": functools.partial(OpenEnv, **{"url": url, **options})}) as (stub, _):
            yield stub


class Halving:
    def __init__(self, form: str = "{}"):
        self.lowest, self.highest, self.form = 1, 7, form

    def __call__(self, seen):
        hint = seen.messages[-1].content
        if hint == "higher":
            self.lowest = self.guess + 1
        elif hint == "lower":
            self.highest = self.guess - 1
        self.guess = (self.lowest + self.highest) // 2
        return say(self.form.format(self.guess))


NUMBERS = {"action_field": "guess", "action_type": "integer"}


async def test_who_reads_the_hints_earns_1_and_who_does_not_0():
    async with played(Guessing(), **NUMBERS) as stub:
        for seed in range(6):
            responses = await play(stub, reset("game", seed=seed), Halving("my guess {}"))
            assert responses[0].messages[0].content == "1 to 7"
            assert responses[-1].terminated and responses[-1].reward == 1.0 and not responses[-1].truncated
            assert not any(r.HasField("reward") for r in responses[:-1])
            assert responses[-1].metrics == {"steps": len(responses) - 1, "refused_actions": 0}
        lost = await play(stub, reset("game", seed=0), lambda _: say("8"))
        assert lost[-1].HasField("reward") and lost[-1].reward == 0.0 and lost[-1].terminated


async def test_an_action_may_be_json():
    async with played(Guessing(), instructions="Guess.") as stub:
        responses = await play(stub, reset("game"), Halving('I think\n```json\n{{"guess": {}}}\n```'))
        assert responses[-1].reward == 1.0 and responses[0].messages[0].content == "Guess.\n\n1 to 7"


async def test_a_reply_that_is_no_action_is_answered():
    async with played(Guessing()) as stub:
        conversation = Conversation(stub)
        await conversation.send(reset("game"))
        for text, answer in [("four", "JSON object"), ("[4]", "JSON object"), ('{"guess": "x"}', "guess: a whole")]:
            response = await conversation.send(say(text))
            assert answer in response.messages[0].content and not response.HasField("reward")
        assert response.metrics == {"steps": 0, "refused_actions": 3}
    async with played(Guessing(), **NUMBERS) as stub:
        conversation = Conversation(stub)
        await conversation.send(reset("game"))
        assert "a whole number" in (await conversation.send(say("four"))).messages[0].content


async def test_the_same_task_is_the_same_game_and_connections_close():
    games = Guessing()
    async with played(games, **NUMBERS) as stub:
        together = await asyncio.gather(*[play(stub, reset("game", seed=s), Halving()) for s in (1, 2, 1, 2)])
        assert together[:2] == together[2:]
        conversation = Conversation(stub)
        await conversation.send(reset("game"))
        conversation.call.cancel()
        async with asyncio.timeout(60):
            while games.closed < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert games.open == 0


async def test_a_full_server_is_waited_for():
    async with played(Guessing(places=1), **NUMBERS) as stub:
        waiting = [play(stub, reset("game", seed=seed), Halving()) for seed in range(3)]
        assert all(responses[-1].reward == 1.0 for responses in await asyncio.gather(*waiting))


async def test_an_end_that_the_metadata_calls_truncation_is_one():
    async def cut(socket) -> None:
        async for text in socket:
            done = json.loads(text)["type"] == "step"
            await socket.send(observation({"a": 1, "b": 2}, 0.5 if done else None, done, metadata={"truncated": done}))

    async with played(cut, observation_field="b", action_field="x") as stub:
        responses = await play(stub, reset("game"), lambda _: say(""))
    assert responses[0].messages[0].content == '{"b": 2}'
    assert responses[-1].truncated and not responses[-1].terminated and responses[-1].reward == 0.5


BROKEN = {
    "raises": error("EXECUTION_ERROR", "boom"),
    "no JSON": "<html>",
    "a list": "[]",
    "another type": json.dumps({"type": "state", "data": {}}),
    "no observation": json.dumps({"type": "observation", "data": {}}),
    "a text reward": observation({"text": "x"}, "high", True),
    "no reward at all": observation({"text": "x"}, None, True),
    "not a number": '{"type": "observation", "data": {"observation": {"text": "x"}, "reward": NaN, "done": true}}',
    "closes": None,
    "silence": "",
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_server_that_breaks_is_no_reward_but_a_failed_episode(kind):
    async def breaks(socket) -> None:
        async for text in socket:
            if json.loads(text)["type"] == "reset":
                await socket.send(observation({"text": "go"}))
            elif BROKEN[kind] is None:
                return
            elif BROKEN[kind]:
                await socket.send(BROKEN[kind])

    async with played(breaks, action_field="x", timeout_s=0.5 if kind == "silence" else 20) as stub:
        code, _ = await Conversation(stub).refusal(reset("game"), say("a"))
    assert code == grpc.StatusCode.INTERNAL


async def test_nobody_there_is_a_failed_episode():
    async with serving({"game": functools.partial(OpenEnv, url="ws://127.0.0.1:1/ws")}) as (stub, _):
        code, details = await Conversation(stub).refusal(reset("game"))
    assert code == grpc.StatusCode.INTERNAL and "cannot be reached" in details


@pytest.mark.parametrize("options", [{"url": "http://x"}, {"action_type": "image"}, {"timeout_s": 0}])
def test_options_that_reach_no_server_are_refused(options):
    with pytest.raises(ValueError, match="url must begin with ws"):
        OpenEnv(**{"url": "ws://x", **options})
