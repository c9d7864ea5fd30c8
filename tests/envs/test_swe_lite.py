"""services.envs.swe_lite: a right change earns 1, and nothing else does, whatever it writes into the repository."""

import json

import pytest

from headrace.v1 import environment_service_pb2 as pb
from headrace.v1 import trajectory_pb2
from services.envs import catalog
from services.envs.environment import ToolCall, assistant
from services.envs.swe_lite import SweLite, repositories
from tests.envs.conversation import DEMONSTRATION, Conversation, answer, play, reset, say, serving
from tests.envs.sandbox.strengths import namespaces_allowed

NAMES = list(repositories())

pytestmark = pytest.mark.skipif(not namespaces_allowed(), reason="no user namespaces")


def serve(**options):
    return serving({"swe_lite": catalog.find("swe_lite", {"sandbox": {"strength": "process"}, **options})})


def call(name: str, **arguments: str) -> ToolCall:
    return ToolCall(id=name, name=name, arguments_json=json.dumps(arguments))


def calls(*made: ToolCall) -> pb.InteractRequest:
    return answer(assistant("", *made))


async def contents(conversation: Conversation, *made: ToolCall) -> list[str]:
    return [message.content for message in (await conversation.send(calls(*made))).messages]


async def reward_of(files: dict[str, str], task: str, *commands: str) -> tuple[float, float]:
    """Reward and share of checks of a policy that writes these files, runs these commands and submits."""
    async with serve(tasks=[task]) as (stub, _):
        conversation = Conversation(stub)
        await conversation.send(reset("swe_lite", split="test"))
        for path, content in files.items():
            assert await contents(conversation, call("write_file", path=path, content=content)) == [f"wrote {path}"]
        for command in commands:
            await conversation.send(calls(call("shell", command=command)))
        last = await conversation.send(calls(call("submit")))
        assert last.terminated and [message.content for message in last.messages] == ["submitted"]
        return last.reward, last.metrics["checks_passed"]


@pytest.mark.parametrize("name", NAMES)
async def test_the_fix_earns_1_and_the_untouched_tree_0(name):
    async with serve(tasks=[name]) as (stub, _):
        request = reset("swe_lite", split="test", purpose=DEMONSTRATION)
        responses = await play(stub, request, lambda response: answer(response.demonstration))
        assert (responses[-1].reward, responses[-1].metrics["checks_passed"]) == (1.0, 1.0)
        responses = await play(stub, reset("swe_lite", split="test"), lambda _: calls(call("submit")))
        assert responses[-1].reward == 0.0 and responses[-1].metrics["checks_passed"] < 1.0


# What a policy may put into every file of the repository to make checks pass without a fix.
TAMPERING = {
    "exits": "import os\nos._exit(0)\n",
    "exits politely": "import sys\nsys.exit(0)\n",
    "answers for the checks": """
import inspect, json, os, sys
frame = sys._getframe()
while frame.f_back:
    frame = frame.f_back
sources = frame.f_globals.get("sources", [])
answers = frame.f_globals.get("answers", 1)
os.write(answers, json.dumps([{"result": True} for _ in sources]).encode())
os._exit(0)
""",
    "replaces the judge's tools": """
import builtins, json, os, sys
class Anything(dict):
    def __eq__(self, other): return True
    def __missing__(self, key): return self
frame = sys._getframe()
while frame.f_back:
    frame = frame.f_back
frame.f_globals["found"] = Anything()
builtins.exec = lambda source, names: names.update(result=True)
json.dumps = lambda *args, **kwargs: "[" + ",".join(["true"] * 9) + "]"
""",
    "looks for the answers": """
import os
for directory in ("/", "/proc/self", "/app", "/scratch"):
    for path, _, names in os.walk(directory):
        for name in names:
            if name.endswith(".toml"):
                raise SystemExit(open(os.path.join(path, name)).read())
raise SystemExit(0)
""",
    "agrees with everything": """
class Agreeable:
    def __getattr__(self, name): return self
    def __call__(self, *args, **kwargs): return True
    def __iter__(self): return iter([True] * 9)
import sys
sys.modules[__name__] = Agreeable()
""",
}
FAKE_HARNESS = {
    "conftest.py": "def pytest_runtest_makereport(item, call): call.excinfo = None\n",
    "sitecustomize.py": "import os\nos._exit(0)\n",
    "usercustomize.py": "import os\nos._exit(0)\n",
    "json.py": "def loads(text): return []\ndef dumps(value): return '[]'\n",
    "pytest.ini": "[pytest]\naddopts = --collect-only\n",
    "checks.py": "result = True\n",
}


@pytest.mark.parametrize("trick", TAMPERING)
@pytest.mark.parametrize("name", ["ledger_cents", "formula"])
async def test_tampering_earns_nothing(name, trick):
    modules = [path for path in repositories()[name].files if path.endswith(".py")]
    reward, passed = await reward_of(dict.fromkeys(modules, TAMPERING[trick]), name)
    assert reward == 0.0 and passed <= 0.4  # what "raises" expects may be raised by accident


async def test_a_fake_harness_and_a_hang_earn_nothing():
    assert (await reward_of(FAKE_HARNESS, "free_slots"))[0] == 0.0
    hanging = {"rooms/__init__.py": "while True: pass\n"}
    async with serve(tasks=["free_slots"], grading_deadline_s=1) as (stub, _):
        conversation = Conversation(stub)
        await conversation.send(reset("swe_lite", split="test"))
        await conversation.send(
            calls(call("write_file", path="rooms/__init__.py", content=hanging["rooms/__init__.py"]))
        )
        last = await conversation.send(say("done"))
        assert (last.reward, last.metrics["checks_passed"], last.terminated) == (0.0, 0.0, True)


async def test_tampering_beside_the_fix_takes_nothing_away():
    fix = dict(repositories()["free_slots"].fix)
    assert await reward_of(fix | {"json.py": "raise ValueError\n", "conftest.py": "1 / 0\n"}, "free_slots") == (
        1.0,
        1.0,
    )
    noisy = {path: f"print('hello')\n{content}" for path, content in fix.items()}
    assert await reward_of(noisy, "free_slots") == (1.0, 1.0)


async def test_what_runs_on_after_submitting_changes_nothing():
    late = "nohup sh -c 'sleep 1; rm -rf *' >/dev/null 2>&1 & "
    assert await reward_of(dict(repositories()["free_slots"].fix), "free_slots", late) == (1.0, 1.0)


async def test_a_full_or_odd_tree_is_graded_too():
    fill = "i=0; while [ $i -lt 5000 ]; do : > f$i || exit 1; i=$((i+1)); done"
    assert (await reward_of({}, "formula", fill))[0] == 0.0
    odd = "ln -s /etc/passwd link; mkfifo pipe; printf x > \"$(printf 'a\\nb')\"; mkdir -p deep/er; : > ' '"
    assert await reward_of(dict(repositories()["formula"].fix), "formula", odd) == (1.0, 1.0)
    assert (await reward_of({}, "formula", "rm -rf *"))[0] == 0.0


async def test_the_tools():
    async with serve(tasks=["ledger_cents"]) as (stub, _):
        conversation = Conversation(stub)
        first = await conversation.send(reset("swe_lite", split="test"))
        prompt = first.messages[0].content
        assert "Statements are off" in prompt and "ledger/amounts.py" in prompt and "result" not in prompt
        assert [tool.name for tool in first.tools] == ["shell", "read_file", "write_file", "edit_file", "submit"]
        (listing,) = await contents(conversation, call("shell", command="ls; python3 -m unittest 2>&1 | tail -1"))
        assert listing == "ledger\ntest_ledger.py\nOK\n[exit status 0]"
        (text,) = await contents(conversation, call("read_file", path="ledger/__init__.py"))
        assert text == repositories()["ledger_cents"].files["ledger/__init__.py"]
        answers = await contents(
            conversation,
            call("edit_file", path="ledger/amounts.py", old="partition", new="rpartition"),
            call("edit_file", path="ledger/amounts.py", old="e", new="é"),
            call("read_file", path="nothing.py"),
            call("write_file", path="../outside.py", content=""),
            call("write_file", path="/etc/passwd", content=""),
            call("write_file", path="ledger", content=""),
            call("shell", command="grep -c rpartition ledger/amounts.py; exit 4"),
        )
        assert answers[0] == "edited ledger/amounts.py" and answers[-1] == "1\n[exit status 4]"
        assert all(text.startswith("error:") for text in answers[1:-1])
        assert "not once" in answers[1] and "no file 'nothing.py'" in answers[2] and "cannot write" in answers[3]


async def test_the_turns_end_with_a_verdict():
    fix = dict(repositories()["free_slots"].fix)
    async with serve(tasks=["free_slots"], turns=1) as (stub, _):
        writes = [call("write_file", path=path, content=content) for path, content in fix.items()]
        responses = await play(stub, reset("swe_lite", split="test"), lambda _: calls(*writes))
        assert (len(responses), responses[-1].reward, responses[-1].terminated) == (2, 1.0, True)


async def test_one_slot_is_enough():
    async with serve(tasks=["free_slots"], sandbox={"strength": "process", "max_open": 1}) as (stub, _):
        for _ in range(2):
            request = reset("swe_lite", split="test", purpose=DEMONSTRATION)
            responses = await play(stub, request, lambda response: answer(response.demonstration))
            assert responses[-1].reward == 1.0


async def test_splits_share_no_task():
    environment = SweLite(sandbox={"strength": "process"})
    assert sum(environment.splits.values()) == len(NAMES) >= 10
    prompts = {}
    for split, count in environment.splits.items():
        prompts[split] = set()
        for index in range(2 * count):
            episode = SweLite(sandbox={"strength": "process"})
            first = await episode.reset(trajectory_pb2.Task(split=split, index=index, seed=index))
            prompts[split].add(first.messages[0].content)
        assert len(prompts[split]) == count
    assert not prompts["train"] & prompts["test"]


@pytest.mark.parametrize("name", NAMES)
def test_every_task_is_one(name):
    task = repositories()[name]
    assert set(task.fix) <= set(task.files) and 2 <= len(task.files) <= 5 and len(task.checks) >= 4
    wanted = [json.dumps(value) for _, value in task.checks]
    # Nobody guesses these: most are no single truth value.
    assert len(set(wanted)) >= 3 and not any(value in ('{"result": true}', '{"result": false}') for value in wanted)
    assert all("result =" in source and len(value) == 1 for source, value in task.checks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["linux"]}, "no tasks"),
        ({"sandbox": {"strength": "monty"}}, "Monty runs no commands"),
        ({"turns": 0}, "turns must be"),
        ({"grading_deadline_s": 0}, "deadlines above 0"),
    ],
)
def test_options_that_make_no_task_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SweLite(**options)
