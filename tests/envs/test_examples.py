"""The examples, outside our tree as somebody else's would be: their own tests pass, and the kit finds no fault."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import processes

EXAMPLES = processes.ROOT / "examples"
UNREACHABLE = ("ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT", "EAI_AGAIN", "ECONNRESET")


def done(*command: str, cwd: Path) -> str:
    """What a command that must succeed writes."""
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=170, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def check(address: str, *arguments: str) -> str:
    return done(sys.executable, "-m", "headrace", "env", "check", address, *arguments, cwd=processes.ROOT)


@pytest.fixture
def python_example(tmp_path) -> Path:
    return Path(shutil.copytree(EXAMPLES / "python_environment", tmp_path / "python_environment"))


def test_the_python_example_s_own_test_passes(python_example):
    pytest_here = (sys.executable, "-m", "pytest", "-q", "--rootdir", str(python_example), "-c", "/dev/null")
    assert "2 passed" in done(*pytest_here, "test_odd_box.py", cwd=python_example)


def test_the_python_example_is_30_lines():
    code = (EXAMPLES / "python_environment" / "odd_box.py").read_text().splitlines()
    assert len([line for line in code if line.strip()]) <= 30


def test_the_python_example_keeps_every_rule(python_example, tmp_path):
    address = f"127.0.0.1:{processes.free_port()}"
    command = processes.service("envs", "odd_box:OddBox", "--set", "boxes=12", "--listen", address, "--capacity", "600")
    ready = lambda: processes.serving(address)  # noqa: E731
    where = {"PYTHONPATH": str(python_example)}
    with processes.running(command, tmp_path / "log", ready=ready, environment=where):
        told = check(address, "--capacity", "600", "--action", "box 3", "--action", "4")
    assert told.splitlines()[-1] == "13 kept, 2 unchecked"


@pytest.fixture(scope="module")
def typescript_example() -> Path:
    """Built, in a folder that later runs use again; skips where there is no Node.js or no registry of its packages."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("Node.js and npm are not installed, and tools/install_node.sh could not install them")
    folder = processes.ROOT / ".cache" / "typescript_environment"
    lock = EXAMPLES / "typescript_environment" / "package-lock.json"
    installed = folder / "node_modules" / ".installed"
    if not installed.exists() or installed.read_text() != lock.read_text():
        shutil.rmtree(folder, ignore_errors=True)
    ignore = shutil.ignore_patterns("node_modules", "dist")
    shutil.copytree(EXAMPLES / "typescript_environment", folder, ignore=ignore, dirs_exist_ok=True)
    if not installed.exists():
        install = ["npm", "ci", "--no-audit", "--no-fund"]
        ended = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=170, check=False)
        if ended.returncode != 0 and any(reason in ended.stderr for reason in UNREACHABLE):
            pytest.skip(f"npm reaches no registry: {ended.stderr[-300:]}")
        assert ended.returncode == 0, ended.stderr
        installed.write_text(lock.read_text())
    done("npm", "run", "build", cwd=folder)
    return folder


def test_the_typescript_example_s_own_test_passes(typescript_example):
    assert "# pass 2" in done("npm", "test", cwd=typescript_example)


def test_the_typescript_example_keeps_every_rule(typescript_example, tmp_path):
    port = processes.free_port()
    command = ["node", str(typescript_example / "dist" / "server.js"), f"127.0.0.1:{port}", "600"]
    where = {"PROTO_DIR": str(processes.ROOT / "proto")}
    with processes.running(
        command, tmp_path / "log", ready=lambda: processes.listening(port), environment=where
    ) as server:
        told = check(f"127.0.0.1:{port}", "--capacity", "600", "--slow", "--slow-s", "1")
        assert told.splitlines()[-1] == "14 kept, 1 unchecked"
        server.terminate()
        assert server.wait(60) == 0


def test_the_lock_file_names_no_registry():
    assert '"resolved"' not in (EXAMPLES / "typescript_environment" / "package-lock.json").read_text()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_step_of_two_minutes_survives_in_both_languages(typescript_example, tmp_path):
    ours, theirs = (f"127.0.0.1:{processes.free_port()}" for _ in range(2))
    options = ("--set", "mean_s=121", "--set", "sigma=0")
    slow = processes.service("envs", "tests.envs.faulty:Slow", *options, "--listen", ours)
    spell = ["node", str(typescript_example / "dist" / "server.js"), theirs]
    where = {"PROTO_DIR": str(processes.ROOT / "proto")}
    listening = lambda: processes.listening(int(theirs.rpartition(":")[2]))  # noqa: E731
    with (
        processes.running(slow, tmp_path / "ours", ready=lambda: processes.serving(ours)),
        processes.running(spell, tmp_path / "theirs", ready=listening, environment=where),
        ThreadPoolExecutor() as checks,
    ):
        told = [
            checks.submit(check, ours, "--rule", "long_step", "--slow", "--slow-action", "now"),
            checks.submit(check, theirs, "--rule", "long_step", "--slow"),
        ]
        assert [future.result().splitlines()[-1] for future in told] == ["1 kept", "1 kept"]
