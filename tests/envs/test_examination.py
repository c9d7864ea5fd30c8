"""services.envs.examination and its verifiers: tasks from a run's config, through a real server."""

import asyncio
import functools
import json
import math

import grpc
import pytest

from services.envs import verifier as verifiers
from services.envs.examination import Examination
from tests.envs.conversation import Conversation, play, reset, say, serving


def judged_by_length(answer, task):
    return None if answer == "?" else len(answer) / task["most"]


async def judged_later(answer, task):
    return answer == "yes"


CASES = [
    ("exact", "42", " 42\n", "43"),
    ("exact", 42, "42", "4 2"),
    ("regex", r"\b42\b", "It is 42.", "421"),
    ("json", {"a": [1, True]}, '{"a": [1, true]}', '{"a": [1, 1]}'),
    ("json", [1], "so:\n```json\n[1]\n```", "[1, 2]"),
    ("json", None, "null", "[" * 100_000),
    ("json", {"a": 1}, '{"a": 1}', '{"a": 2, "a": 1}'),
    (f"{__name__}:judged_later", None, "yes", "no"),
]


@pytest.mark.parametrize(("verifier", "expected", "right", "wrong"), CASES)
async def test_the_right_answer_earns_1_and_a_wrong_one_0(verifier, expected, right, wrong):
    tasks = [{"prompt": "?", "expected": expected}]
    async with serving({"exam": functools.partial(Examination, tasks=tasks, verifier=verifier)}) as (stub, _):
        for text, reward in [(right, 1.0), (wrong, 0.0), ("", 0.0), ("\0", 0.0)]:
            responses = await play(stub, reset("exam"), lambda _, text=text: say(text))
            assert responses[-1].terminated and responses[-1].HasField("reward") and responses[-1].reward == reward


async def test_a_function_that_gives_no_judgement_fails_the_episode():
    tasks = [{"prompt": "?", "most": 4}]
    verifier = f"{__name__}:judged_by_length"
    async with serving({"exam": functools.partial(Examination, tasks=tasks, verifier=verifier)}) as (stub, _):
        assert (await play(stub, reset("exam"), lambda _: say("ab")))[-1].reward == 0.5
        code, details = await Conversation(stub).refusal(reset("exam"), say("?"))
    assert code == grpc.StatusCode.INTERNAL and "gave no judgement" in details


async def test_a_pattern_that_takes_for_ever_fails_the_episode_and_stops_nobody_else():
    tasks = [{"prompt": "?", "expected": "^(a+)+$"}]
    options = {"tasks": tasks, "verifier": "regex", "timeout_s": 2}
    async with serving({"exam": functools.partial(Examination, **options)}) as (stub, _):
        endless = asyncio.create_task(Conversation(stub).refusal(reset("exam"), say("a" * 60 + "!")))
        assert (await play(stub, reset("exam"), lambda _: say("aaa")))[-1].reward == 1.0
        code, details = await endless
    assert code == grpc.StatusCode.INTERNAL and "matches took longer than 2 s" in details


async def test_a_file_s_tasks_are_taken_by_split_and_index(tmp_path):
    path = tmp_path / "tasks.jsonl"
    lines = [{"prompt": f"{n}?", "expected": n} for n in range(3)] + [{"prompt": "t", "expected": 9, "split": "test"}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    environment = Examination(tasks=str(path))
    assert environment.splits == {"train": 3, "test": 1}
    for index, prompt in [(0, "0?"), (2, "2?"), (4, "1?")]:
        assert (await environment.reset(reset("exam", index=index).reset)).messages[0].content == prompt
    assert (await environment.reset(reset("exam", index=7, split="test").reset)).messages[0].content == "t"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tasks": []}, "there are none"),
        ({"tasks": [{"expected": 1}]}, "needs a text `prompt`"),
        ({"tasks": [{"prompt": "?"}]}, "needs `expected`"),
        ({"tasks": [{"prompt": "?", "expected": "("}], "verifier": "regex"}, "no regular expression"),
        ({"verifier": "eval"}, "no verifier 'eval'"),
        ({"verifier": "nowhere:verify"}, "cannot be imported"),
        ({"verifier": "exact", "judge": {}}, "either decides"),
        ({"tasks": "/absent.jsonl"}, "cannot be read"),
        ({"turns": 0}, "turns must be"),
        ({"attempts": 0}, "attempts must be"),
    ],
)
def test_what_makes_no_task_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Examination(**{"tasks": [{"prompt": "?", "expected": 1}], **options})


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "?"\n')
    with pytest.raises(ValueError, match="is not JSON"):
        Examination(tasks=str(path))


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "9" * 5000])
async def test_what_is_no_json_is_not_right(text):
    assert await verifiers.find("json")(text, {"expected": math.nan}) == 0.0


async def test_a_verifier_evaluates_nothing(tmp_path):
    canary = tmp_path / "canary"
    code = f"__import__('pathlib').Path({str(canary)!r}).touch()"
    for name in ("exact", "json"):
        assert await verifiers.find(name)(code, {"expected": "1"}) == 0.0
    assert not canary.exists()
