"""python -m services.envs: the real process, from its command line to its end."""

import json
import signal
import subprocess
import sys
import urllib.request

import grpc
import pytest

from headrace import rpc
from headrace.v1 import environment_service_pb2_grpc as pb_grpc
from tests import processes
from tests.envs.conversation import Conversation, reset, say


def command(*arguments: str) -> list[str]:
    return processes.service("envs", *arguments)


def complaint(*arguments: str) -> str:
    """What a start that must fail says."""
    done = subprocess.run(
        command(*arguments), cwd=processes.ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.fixture
def served(tmp_path):
    """The shipped config's environment, as the launcher starts it."""
    port, metrics_port = processes.free_port(), processes.free_port()
    arguments = command(
        *("--config", "configs/guess_number.yaml", "--environment", "guess_number", "--drain-timeout-s", "5"),
        *("--listen", f"127.0.0.1:{port}", "--metrics-listen", f"127.0.0.1:{metrics_port}"),
    )
    ready = lambda: processes.serving(f"127.0.0.1:{port}")  # noqa: E731
    with processes.running(arguments, tmp_path / "log", ready=ready) as process:
        yield process, f"127.0.0.1:{port}", metrics_port


async def test_it_serves_the_config_s_environment_and_counts(served):
    _, address, metrics_port = served
    async with rpc.channel(address) as channel:
        conversation = Conversation(pb_grpc.EnvironmentServiceStub(channel))
        assert (await conversation.send(reset("guess_number", index=3))).messages[
            0
        ].content == "guess a number from 1 to 8"
        assert (await conversation.send(say("4"))).reward == 1.0
        refused = Conversation(pb_grpc.EnvironmentServiceStub(channel))
        await refused.refusal(reset("nobody"))
    page = urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics").read().decode()  # noqa: ASYNC210
    assert 'headrace_envs_steps_total{environment="guess_number"} 2.0' in page
    assert 'headrace_envs_step_seconds_count{call="reset",environment="guess_number"} 1.0' in page
    assert 'headrace_envs_failures_total{cause="not_found",environment="unknown"} 1.0' in page
    assert 'headrace_envs_active_episodes{environment="guess_number"} 0.0' in page


async def test_sigterm_lets_running_episodes_end(served):
    process, address, _ = served
    async with rpc.channel(address) as channel:
        conversation = Conversation(pb_grpc.EnvironmentServiceStub(channel))
        await conversation.send(reset("guess_number", index=3))
        process.terminate()
        processes.wait_until(lambda: "draining" in process.output, timeout_s=60)
        assert (await conversation.send(say("4"))).reward == 1.0
        assert await conversation.end() == (grpc.StatusCode.OK, "")
    assert process.wait(60) == 0


async def test_sigterm_ends_what_does_not(served):
    process, address, _ = served
    async with rpc.channel(address) as channel:
        conversation = Conversation(pb_grpc.EnvironmentServiceStub(channel))
        await conversation.send(reset("guess_number"))
        process.terminate()
        assert process.wait(20) == 0


async def test_any_class_is_served_without_a_config(tmp_path):
    port = processes.free_port()
    arguments = command(*("tests.envs.faulty:Kills", "--options", '{"when": "step"}', "--listen", f"127.0.0.1:{port}"))
    ready = lambda: processes.serving(f"127.0.0.1:{port}")  # noqa: E731
    with processes.running(arguments, tmp_path / "log", ready=ready) as process:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            conversation = Conversation(pb_grpc.EnvironmentServiceStub(channel))
            code, _ = await conversation.refusal(reset("Kills"), say())
        assert code == grpc.StatusCode.UNAVAILABLE
        assert process.wait(60) == -signal.SIGKILL


async def test_a_setup_is_shared_and_closed_by_the_drain(tmp_path):
    port, record = processes.free_port(), tmp_path / "record"
    arguments = command(
        *("tests.envs.shared:Shared", "--set", f"record={record}", "--set", "words=2", "--listen", f"127.0.0.1:{port}")
    )
    ready = lambda: processes.serving(f"127.0.0.1:{port}")  # noqa: E731
    with processes.running(arguments, tmp_path / "log", ready=ready) as process:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            stub = pb_grpc.EnvironmentServiceStub(channel)
            prompts = [(await Conversation(stub).send(reset("Shared"))).messages[0].content for _ in range(2)]
        assert prompts == ["set up once of 2", "set up once of 2"] and record.read_text() == "open\n"
        process.terminate()
        assert process.wait(60) == 0
    assert record.read_text() == "open\nclosed\n"


async def test_a_stop_cuts_a_slow_setup_short(tmp_path):
    port, record = processes.free_port(), tmp_path / "record"
    arguments = command(
        *("tests.envs.shared:Shared", "--set", f"record={record}", "--set", "setup_s=600"),
        *("--listen", f"127.0.0.1:{port}"),
    )
    with processes.running(arguments, tmp_path / "log", ready=record.exists) as process:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            code, _ = await Conversation(pb_grpc.EnvironmentServiceStub(channel)).refusal(reset("Shared"))
        assert code == grpc.StatusCode.UNAVAILABLE and not processes.serving(f"127.0.0.1:{port}")
        process.terminate()
        assert process.wait(60) == 0
    assert record.read_text() == "open\nclosed\n"


def test_a_server_of_a_class_imports_nothing_heavy():
    program = (
        "import sys\n"
        "from services.envs import __main__, catalog\n"
        "catalog.find('guess_number', {}), catalog.find('calculator', {})\n"
        "import json; print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=processes.ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    heavy = {"jax", "numpy", "redis", "pydantic", "yaml", "transformers", "tokenizers", "jinja2", "aiohttp"}
    assert not heavy & set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--config", "absent.yaml", "--environment", "x"], "absent.yaml: cannot be read"),
        (["--config", "configs/guess_number.yaml", "--environment", "chess"], "--environment names ['guess_number']"),
        (["chess"], "no environment 'chess': name one of calculator, guess_number"),
        (["no_chess:Chess"], "environment no_chess:Chess cannot be imported: No module named 'no_chess'"),
        (["json:dumps"], "json:dumps is no subclass of services.envs.environment.Environment"),
        (
            ["guess_number", "--metrics-listen", "127.0.0.1:99999"],
            "--metrics-listen '127.0.0.1:99999' is no",
        ),
        (["guess_number", "--options", "{"], "--options is not JSON"),
        (["guess_number", "--options", "[]"], "--options must be a JSON object"),
        (["guess_number", "--options", '{"turns": 0}'], "refuses its options {'turns': 0}: numbers must be"),
        (["guess_number", "--options", '{"size": 3}'], "unexpected keyword argument 'size'"),
        (["guess_number", "--set", "turns=0"], "refuses its options {'turns': 0}: numbers must be"),
        (["guess_number", "--set", "turns"], "--set turns: write KEY=VALUE"),
    ],
)
def test_a_wrong_start_says_so_in_one_line(arguments, says):
    assert says in complaint(*arguments, "--listen", "127.0.0.1:0")


def test_a_setup_that_raises_says_where_and_why():
    arguments = command("tests.envs.shared:Unable", "--listen", "127.0.0.1:0")
    done = subprocess.run(arguments, cwd=processes.ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "in setup\n" in done.stderr
    says = "error: the environment's setup raised OSError: the port of the simulator is taken"
    assert done.stderr.splitlines()[-1] == says


def test_a_taken_port_is_said(served):
    _, address, metrics_port = served
    assert f"--listen {address} cannot be bound" in complaint("guess_number", "--listen", address)
    metrics_address = f"127.0.0.1:{metrics_port}"
    arguments = ("guess_number", "--listen", "127.0.0.1:0", "--metrics-listen", metrics_address)
    assert f"--metrics-listen {metrics_address} cannot be bound" in complaint(*arguments)
