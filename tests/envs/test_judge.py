"""services.envs.judge: a reward from an endpoint that answers, refuses, breaks or hangs, through a real server."""

import asyncio
import functools

import grpc
import pytest
from aiohttp import web

from services.envs.examination import Examination
from services.envs.judge import Judge
from tests.envs.conversation import Conversation, play, reset, say, serving
from tests.envs.web_service import web_service

TASKS = [{"prompt": "Name a prime.", "expected": "7"}, {"prompt": "Name a square.", "split": "test"}]


def completion(text: object) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


SCORES = {
    "SCORE: 10": 1.0,
    "It is right.\n\nSCORE: 10\n": 1.0,
    "wrong\n**Score: 0**": 0.0,
    "half\nscore: 2.5": 0.25,
}
NOTHING = {
    "refusal": lambda: completion("I cannot judge this."),
    "no content": lambda: completion(None),
    "a list": lambda: completion(["SCORE: 1"]),
    "out of range": lambda: completion("SCORE: 11"),
    "not a number": lambda: completion("SCORE: nan"),
    "a score quoted before the end": lambda: completion("It says\nSCORE: 10\nbut I cannot tell."),
    "no JSON": lambda: web.Response(text="<html>"),
    "other JSON": lambda: web.json_response([1]),
    "nested JSON": lambda: web.Response(text="[" * 100_000),
    "an empty body": web.Response,
    "not found": lambda: web.json_response({"error": "no model"}, status=404),
    "elsewhere": lambda: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}),
    "broken": lambda: web.json_response({}, status=500),
    "busy": lambda: web.json_response({}, status=429),
    "silence": lambda: "hang",
    "a cut": lambda: "cut",
}


def served(url: str, *, timeout_s: float = 20, attempts: int = 2, **judge):
    options = {"tasks": TASKS, "timeout_s": timeout_s, "attempts": attempts}
    judge = {"url": f"{url}/v1", "model": "grader", **judge}
    return serving({"judged": functools.partial(Examination, judge=judge, **options)})


@pytest.mark.parametrize(("text", "reward"), SCORES.items())
async def test_a_score_is_a_reward(text, reward):
    async with (
        web_service(lambda number, asked: completion(text)) as service,
        served(service.url) as (stub, _),
    ):
        responses = await play(stub, reset("judged"), lambda _: say("7"))
    assert responses[0].messages[0].content == "Name a prime."
    assert responses[-1].terminated and responses[-1].HasField("reward") and responses[-1].reward == reward


async def test_the_judge_sees_task_answer_and_reference_and_the_policy_sees_no_key(tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    async with (
        web_service(lambda number, asked: completion("SCORE: 5")) as service,
        served(service.url, api_key_file=str(key), criteria="Judge {braces}.", lowest=0, highest=5) as (stub, _),
    ):
        await play(stub, reset("judged"), lambda _: say("it is {7}"))
        await play(stub, reset("judged", split="test"), lambda _: say("9"))
    first, second = service.requests
    assert first["path"] == "/v1/chat/completions" and first["headers"]["Authorization"] == "Bearer secret"
    assert first["body"]["model"] == "grader" and first["body"]["temperature"] == 0
    text = first["body"]["messages"][0]["content"]
    for part in ("Name a prime.", "it is {7}", "A right answer:\n7", "Judge {braces}.", "from 0 (worthless) to 5"):
        assert part in text
    assert "A right answer" not in second["body"]["messages"][0]["content"]


@pytest.mark.parametrize("kind", NOTHING)
async def test_what_is_no_judgement_is_no_reward_but_a_failed_episode(kind):
    timeout_s = 0.2 if kind == "silence" else 20
    async with (
        web_service(lambda number, asked: NOTHING[kind]()) as service,
        served(service.url, timeout_s=timeout_s) as (stub, _),
    ):
        code, details = await Conversation(stub).refusal(reset("judged"), say("7"))
    assert code == grpc.StatusCode.INTERNAL and "NoJudgement" in details and len(details) < 600


async def test_nobody_there_is_no_reward():
    async with served("http://127.0.0.1:1") as (stub, _):
        code, details = await Conversation(stub).refusal(reset("judged"), say("7"))
    assert code == grpc.StatusCode.INTERNAL and "cannot be asked" in details


@pytest.mark.parametrize("kind", ["refusal", "no JSON", "out of range", "broken", "busy", "a cut"])
async def test_a_judge_that_recovers_costs_nothing(kind):
    async with (
        web_service(lambda number, asked: NOTHING[kind]() if number == 0 else completion("SCORE: 10")) as service,
        served(service.url) as (stub, _),
    ):
        responses = await play(stub, reset("judged"), lambda _: say("7"))
    assert responses[-1].reward == 1.0 and len(service.requests) == 2


async def test_a_client_s_mistake_is_not_repeated():
    async with web_service(lambda number, asked: NOTHING["not found"]()) as service, served(service.url) as (stub, _):
        await Conversation(stub).refusal(reset("judged"), say("7"))
    assert len(service.requests) == 1


async def test_requests_at_once_are_bounded():
    options = {"tasks": TASKS, "max_concurrent_requests": 3}

    async with web_service(lambda number, asked: (0.05, completion("SCORE: 10"))) as service:
        judge = {"url": service.url, "model": "grader"}
        async with serving({"judged": functools.partial(Examination, judge=judge, **options)}) as (stub, _):
            await asyncio.gather(*[play(stub, reset("judged"), lambda _: say("7")) for _ in range(20)])
    assert len(service.requests) == 20 and service.most_running == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"url": ""}, "url and model"),
        ({"lowest": 3, "highest": 3}, "lowest below highest"),
        ({"judgements": 0}, "above 0"),
        ({"api_key_file": "/absent"}, "cannot be read"),
    ],
)
def test_options_that_make_no_judge_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Judge(**{"url": "http://127.0.0.1:1", "model": "grader", **options})
