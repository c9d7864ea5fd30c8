"""The command `headrace env`, against servers that are processes of their own."""

import contextlib
import json
import os
import pty
import subprocess
import sys

import pytest

from tests import certificates, processes

HEADRACE = [sys.executable, "-m", "headrace", "env"]


@contextlib.contextmanager
def served(folder, *arguments: str):
    address = f"127.0.0.1:{processes.free_port()}"
    command = processes.service("envs", *arguments, "--listen", address)
    with processes.running(command, folder / "log", ready=lambda: processes.serving(address)):
        yield address


@pytest.fixture(scope="module")
def guess_number(tmp_path_factory):
    with served(tmp_path_factory.mktemp("served"), "guess_number", "--capacity", "8") as address:
        yield address


@pytest.fixture(scope="module")
def calculator(tmp_path_factory):
    with served(tmp_path_factory.mktemp("served"), "calculator") as address:
        yield address


def env(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HEADRACE, *arguments],
        cwd=processes.ROOT,
        input=typed,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_a_good_server_is_checked_with_exit_code_0(guess_number):
    done = env("check", guess_number, "--capacity", "8", "--parallel", "100")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == f"{guess_number}  guess_number" and lines[-1] == "14 kept, 1 unchecked"


def test_a_broken_one_with_exit_code_1_and_its_reproduction(tmp_path):
    with served(tmp_path, "tests.envs.faulty:NaNReward") as address:
        done = env("check", address, "--rule", "reward", "--rule", "unknown_task")
        assert done.returncode == 1
        assert "BROKEN    reward" in done.stdout and "1 kept, 1 broken" in done.stdout
        assert '            > reset { task_id: "check" environment: "NaNReward"' in done.stdout
        assert "            < INTERNAL: step gave the reward nan, not a finite number" in done.stdout
        findings = [
            json.loads(line) for line in env("check", address, "--json", "--rule", "reward").stdout.splitlines()
        ]
    assert [(finding["rule"], finding["result"]) for finding in findings] == [("reward", "broken")]
    assert findings[0]["reproduction"][0][-1].startswith("< INTERNAL")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "127.0.0.1:9", "--timeout-s", "0.5"], "127.0.0.1:9: nothing answers"),
        (["check", "{address}", "--environment", "chess"], "offers no environment 'chess', but guess_number"),
        (["play", "{address}", "--environment", "chess"], "offers no environment 'chess', but guess_number"),
        (["bench", "{address}", "--environment", "chess"], "offers no environment 'chess', but guess_number"),
        (["check", "{address}", "--parallel", "0"], "must be at least 1"),
        (["bench", "{address}", "--seconds", "0"], "must be at least 1, --seconds above 0"),
        (["check", "{address}", "--rule", "manners"], "invalid choice: 'manners'"),
    ],
)
def test_what_a_person_got_wrong_is_exit_code_2(guess_number, arguments, says):
    done = env(*(argument.format(address=guess_number) for argument in arguments))
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_an_episode_is_played_from_a_pipe(guess_number):
    done = env("play", guess_number, "--index", "3", typed="6\nno number\n4\n")
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [
            "[user] guess a number from 1 to 8",
            "> 6",
            "[user] lower",
            "> no number",
            "[user] invalid",
            "> 4",
            "[user] found",
            "[reward] 1",
            "[terminated] total reward 1 guesses=3 invalid_guesses=1",
        ],
    )


def test_tools_are_called_in_every_way(calculator):
    typed = '/calculate expression=3+4\n/calculate {"expression": "2*3"} ;; /foo\n/calculate three\n/malformed\n/quit\n'
    done = env("play", calculator, typed=typed)
    lines = [line for line in done.stdout.splitlines() if not line.startswith(">")]
    assert done.returncode == 0 and lines[0].startswith("[tool] /calculate expression=string  Evaluates")
    assert lines[2:] == [
        "[tool] 7",
        "[tool] 6",
        "[tool] error",
        "[?] 'three' is no argument: write /NAME {\"argument\": 1} or /NAME argument=1",
        "[tool] error",
    ]


def test_several_lines_are_one_message_and_the_end_of_input_leaves(guess_number):
    done = env("play", guess_number, "--index", "3", typed="it is\\\n4\n")
    assert "[user] found" in done.stdout
    assert env("play", guess_number).returncode == 0


def test_a_server_that_fails_is_exit_code_1(tmp_path):
    with served(tmp_path, "tests.envs.faulty:Raises") as address:
        done = env("play", address, typed="1\n")
    assert done.returncode == 1
    assert (
        "the server ended the episode: INTERNAL: step raised RuntimeError: the simulator is out of fuel" in done.stdout
    )


def test_an_episode_is_played_in_a_terminal(guess_number):
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*HEADRACE, "play", guess_number, "--index", "3"],
        cwd=processes.ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        seen = b""
        for shown, typed in ((b"1 to 8\r\n> ", b"6\n"), (b"lower\r\n> ", b"4\n"), (b"total reward 1", b"")):
            while not seen.endswith(shown) and shown not in seen:
                seen += os.read(ours, 1024)
            os.write(ours, typed)
            seen = b""
        with contextlib.suppress(OSError):  # the terminal's end
            while os.read(ours, 1024):
                pass
        assert process.wait(60) == 0
    os.close(ours)


def test_a_server_is_measured(guess_number):
    measured = json.loads(env("bench", guess_number, "--seconds", "1", "--parallel", "4", "--json").stdout)
    assert measured["environment"] == "guess_number" and measured["parallel"] == 4 and measured["failures"] == {}
    assert measured["steps"] > measured["episodes"] > 0 and measured["steps_per_s"] > 0
    assert 0 < measured["step_p50_ms"] <= measured["step_p99_ms"]
    done = env("bench", guess_number, "--seconds", "0.5", "--parallel", "4")
    assert done.returncode == 0 and "p99" in done.stdout and "failed" not in done.stdout


def test_a_measurement_with_failures_says_them(tmp_path):
    with served(tmp_path, "tests.envs.faulty:Raises") as address:
        done = env("bench", address, "--seconds", "0.5", "--parallel", "2")
    assert done.returncode == 1 and "the simulator is out of fuel" in done.stdout


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """A server of a class with TLS and a token, its address, and the flags of who may call it."""
    folder = tmp_path_factory.mktemp("secured")
    issued, token = certificates.Authority(folder).issue("environment"), certificates.token_file(folder)
    port, health = processes.free_port(), f"127.0.0.1:{processes.free_port()}"
    arguments = processes.service(
        *("envs", "guess_number", "--capacity", "8", "--listen", f"127.0.0.1:{port}", "--health-listen", health),
        *("--tls-certificate", str(issued.certificate), "--tls-key", str(issued.key), "--token-file", str(token)),
    )
    with processes.running(arguments, folder / "log", ready=lambda: processes.serving(health)):
        yield f"127.0.0.1:{port}", ["--tls-authority", str(issued.authority)], ["--token-file", str(token)]


def test_a_server_with_tls_and_a_token_is_checked_played_and_measured(secured):
    address, tls, token = secured
    checked = env("check", address, *tls, *token, "--rule", "one_answer", "--rule", "unknown_task")
    assert checked.returncode == 0 and "2 kept" in checked.stdout
    played = env("play", address, *tls, *token, "--index", "3", typed="4\n")
    assert played.returncode == 0 and "[user] found" in played.stdout
    measured = env("bench", address, *tls, *token, "--seconds", "0.5", "--parallel", "2")
    assert measured.returncode == 0 and "p99" in measured.stdout


def test_who_may_not_call_a_secured_server_is_told_the_flag(secured):
    address, tls, _ = secured
    for kind in ("check", "play", "bench"):
        done = env(kind, address, *tls)
        assert (
            done.returncode == 2
            and "asks for a token" in done.stderr
            and "give its token's --token-file" in done.stderr
        )
    done = env("check", address, "--timeout-s", "3")
    assert done.returncode == 2 and "if it speaks TLS" in done.stderr and "--tls-authority" in done.stderr
    done = env("check", address, "--timeout-s", "3", "--tls")
    assert done.returncode == 2 and "is not to be trusted" in done.stderr
