"""services.envs.mcp_tools: tools of real MCP servers, over stdio and over HTTP, through a real server."""

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import grpc
import pytest

from services.envs.mcp_tools import McpTools
from tests import processes
from tests.envs.conversation import Conversation, reset, say, serving
from tests.envs.sandbox.strengths import running
from tests.envs.test_http_tool import ask, call

TASKS = [{"prompt": "What is 2 + 3?", "expected": "5"}]
COMMAND = [sys.executable, "-m", "tests.envs.mcp_server"]


def served(**options):
    where = {} if "url" in options else {"command": COMMAND, "environment": {"PYTHONPATH": str(processes.ROOT)}}
    options = {"tasks": TASKS, "call_timeout_s": 60.0, **where, **options}
    return serving({"sums": functools.partial(McpTools, **options)})


def children() -> set[int]:
    """Processes of the MCP server that this one started."""
    found = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True, check=False
    )
    return {int(line.split()[0]) for line in found.stdout.splitlines() if "tests.envs.mcp_server" in line}


async def none_left() -> None:
    await asyncio.to_thread(processes.wait_until, lambda: not children(), timeout_s=60)


@contextlib.contextmanager
def http_server(tmp_path: Path):
    port = processes.free_port()
    arguments = [*COMMAND, str(port)]
    with processes.running(arguments, tmp_path / "log", ready=lambda: processes.listening(port)) as process:
        yield process, f"http://127.0.0.1:{port}/mcp"


async def right_and_wrong(stub) -> None:
    for text, reward in [("5", 1.0), ("6", 0.0)]:
        conversation = Conversation(stub)
        first = await conversation.send(reset("sums"))
        assert first.messages[0].content == "What is 2 + 3?"
        assert {tool.name for tool in first.tools} >= {"add", "keep"} and "Adds two" in str(first.tools)
        answers = await conversation.send(ask(call({"a": 2, "b": 3}), call({"number": 4}, "keep", "call_1")))
        assert [(m.tool_call_id, m.content) for m in answers.messages] == [("call_0", "5"), ("call_1", "[4]")]
        last = await conversation.send(say(text))
        assert (last.reward, last.terminated) == (reward, True)


async def test_over_stdio_each_episode_has_a_server_of_its_own():
    async with served() as (stub, _):
        await right_and_wrong(stub)  # `keep` tells one number each time
        conversation = Conversation(stub)
        await conversation.send(reset("sums"))
        mistakes = ask(
            *(call({"a": 1, "b": 0}, "divide"), call({"a": "x", "b": 1}), call({}), call({}, "sub"), call([1])),
            malformed_tool_calls=["not JSON"],
        )
        answers = [message.content for message in (await conversation.send(mistakes)).messages]
        assert all(text.startswith("error: ") for text in answers) and "division by zero" in answers[0]
        secret = await conversation.send(ask(call({"name": "HEADRACE_SECRET"}, "variable")))
        assert secret.messages[0].content == ""
        conversation.call.cancel()
        await none_left()


async def test_a_server_that_dies_or_hangs_is_no_reward_but_a_failed_episode():
    async with served(call_timeout_s=60.0) as (stub, _):
        code, details = await Conversation(stub).refusal(reset("sums"), ask(call({}, "crash")))
        assert code == grpc.StatusCode.INTERNAL and "ServerLost" in details
        conversation = Conversation(stub)
        await conversation.send(reset("sums"))
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        code, details = await conversation.refusal(ask(call({"a": 2, "b": 3})))
        assert code == grpc.StatusCode.INTERNAL and "ServerLost" in details
        await none_left()


async def test_a_call_past_its_deadline_fails_the_episode():
    environment = McpTools(
        tasks=TASKS, command=COMMAND, environment={"PYTHONPATH": str(processes.ROOT)}, call_timeout_s=60.0
    )
    await environment.reset(reset("sums").reset)
    environment._session._timeout_s = 0.3  # the start may take its time
    with pytest.raises(Exception, match="gave no answer"):
        await environment.step(ask(call({}, "sleep")).action)
    await environment.close()
    await none_left()


async def test_a_killed_server_of_ours_leaves_no_mcp_server():
    marker = f"marker-{uuid.uuid4()}"
    # A server that does not end with its input.
    stubborn = "import runpy, time; runpy.run_module('tests.envs.mcp_server', run_name='__main__'); time.sleep(600)"
    command = [sys.executable, "-c", stubborn, "0", marker]
    program = (
        "import asyncio, json\n"
        "from services.envs.mcp_tools import McpTools\n"
        "from tests.envs.conversation import reset\n"
        "async def main():\n"
        f"    environment = McpTools(tasks=[{{'prompt': '?', 'expected': ''}}], command={command!r},"
        f" environment={{'PYTHONPATH': {str(processes.ROOT)!r}}}, call_timeout_s=600)\n"
        "    await environment.reset(reset('sums').reset)\n"
        "    print('open', flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    ours = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", program], cwd=processes.ROOT, stdout=subprocess.PIPE, text=True
    )
    with ours:
        assert await asyncio.to_thread(ours.stdout.readline) == "open\n"
        assert running(marker)
        ours.kill()
    await asyncio.to_thread(processes.wait_until, lambda: not running(marker), timeout_s=60)


@pytest.mark.parametrize("command", [["/absent/server"], [sys.executable, "-c", "pass"]])
async def test_a_server_that_does_not_start_says_so(command):
    async with served(command=command) as (stub, _):
        code, details = await Conversation(stub).refusal(reset("sums"))
    assert code == grpc.StatusCode.INTERNAL and "ServerLost" in details


async def test_over_http(tmp_path):
    with http_server(tmp_path) as (process, url):
        async with served(url=url, only=["add", "keep"]) as (stub, _):
            conversation = Conversation(stub)
            assert [tool.name for tool in (await conversation.send(reset("sums"))).tools] == ["add", "keep"]
            assert (await conversation.send(ask(call({"a": 2, "b": 3})))).messages[0].content == "5"
            process.kill()
            process.wait(60)
            code, details = await conversation.refusal(ask(call({"a": 2, "b": 3})))
            assert code == grpc.StatusCode.INTERNAL and "ServerLost" in details
            code, _ = await Conversation(stub).refusal(reset("sums"))
            assert code == grpc.StatusCode.INTERNAL


async def test_a_tool_that_the_server_lacks_fails_the_reset():
    async with served(only=["multiply"]) as (stub, _):
        code, details = await Conversation(stub).refusal(reset("sums"))
    assert code == grpc.StatusCode.INTERNAL and "no tool multiply" in details


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "either command"),
        ({"command": ["x"], "url": "http://x"}, "either command"),
        ({"command": "x"}, "a list of words"),
        ({"command": ["x"], "call_timeout_s": 0}, "above 0"),
    ],
)
def test_what_makes_no_server_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        McpTools(tasks=TASKS, **options)
