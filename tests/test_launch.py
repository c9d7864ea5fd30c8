"""`headrace run` in a process of its own: what a user got wrong ends it with one line and code 2, and nothing stays."""

import asyncio
import io
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
import yaml

from headrace import config as run_config
from headrace import launch, local_run
from headrace.errors import StartupError
from headrace.process import Process
from headrace.progress import Display
from tests import processes
from tests.processes import ROOT, wait_until

RUN_FILE = ROOT / "configs" / "guess_number.yaml"


def headrace(tmp_path: Path, *arguments: str, config: Path = RUN_FILE) -> processes.Process:
    """Starts a run whose folder, and thus whose every process's command line, lies in tmp_path."""
    command = [sys.executable, "-m", "headrace", "run", str(config), "--set", f"run.directory={tmp_path / 'runs'}"]
    return processes.Process([*command, *arguments], tmp_path / "headrace.log")


def left_running(tmp_path: Path) -> list[str]:
    """Command lines of processes that name the test's folder or work in it, as Redis does, which hides its own."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            works_in = str((folder / "cwd").readlink())
        except (OSError, ValueError):
            continue
        if str(tmp_path) in command + works_in:
            found.append(command)
    return found


def assert_one_line(tmp_path: Path, launched: processes.Process, pattern: str, *, timeout_s: float = 90) -> None:
    assert launched.wait(timeout_s) == 2, launched.output
    errors = [line for line in launched.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, launched.output
    assert re.search(pattern, errors[0]), errors[0]
    assert "Traceback" not in launched.output
    assert left_running(tmp_path) == []


def test_every_config_error_is_named_at_once(tmp_path):
    launched = headrace(tmp_path, "--set", "trainer.stepss=3", "--set", "rollout.group_size=1")
    assert launched.wait(60) == 2
    assert [line.split(": ")[2] for line in launched.output.splitlines()] == ["trainer.stepss", "rollout.group_size"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("value", ["trainer.steps", "=3", "trainer.steps=[1"])
def test_a_malformed_override_is_named(tmp_path, value):
    assert_one_line(tmp_path, headrace(tmp_path, "--set", value), re.escape(value))


def test_a_missing_file_is_named(tmp_path):
    assert_one_line(tmp_path, headrace(tmp_path, config=tmp_path / "absent.yaml"), "absent.yaml: cannot be read")


def test_a_broken_model_folder_is_named(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{")
    tree = yaml.safe_load(RUN_FILE.read_text())
    tree["model"] = {"path": str(folder)}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    assert_one_line(tmp_path, headrace(tmp_path, config=file), r"model/config\.json")


def test_an_absent_redis_is_named(tmp_path):
    url = f"redis://127.0.0.1:{processes.free_port()}/0"
    launched = headrace(tmp_path, "--set", f"redis.url={url}", "--set", "redis.timeout_s=1")
    assert_one_line(tmp_path, launched, f"redis.url {url}: no Redis answers")


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert_one_line(tmp_path, headrace(tmp_path, "--set", f"trainer.address={address}"), f"trainer: .*{address}")


def test_an_unknown_environment_class_is_named(tmp_path):
    launched = headrace(tmp_path, "--set", "environments.guess_number.class=gess_number")
    assert_one_line(tmp_path, launched, "gess_number")


def test_a_run_that_another_launcher_works_on_is_left_alone(tmp_path):
    overrides = {"run.id": "mine", "run.directory": str(tmp_path / "runs")}
    with local_run.exclusive(local_run.plan(run_config.load(RUN_FILE, overrides=overrides))):
        assert_one_line(tmp_path, headrace(tmp_path, "--set", "run.id=mine"), "run.id mine: another")
    assert not (tmp_path / "runs" / "mine" / "config.yaml").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(tmp_path, number):
    launched = headrace(tmp_path)
    wait_until(lambda: len(left_running(tmp_path)) >= 6, timeout_s=60, process=launched)
    os.kill(launched.pid, number)
    assert launched.wait(60) == 130, launched.output
    assert left_running(tmp_path) == []
    assert "logs " in launched.output


def test_kill_9_of_the_launcher_leaves_nothing(tmp_path):
    launched = headrace(tmp_path)
    wait_until(lambda: len(left_running(tmp_path)) >= 6, timeout_s=60, process=launched)
    os.kill(launched.pid, signal.SIGKILL)
    launched.wait(10)
    wait_until(lambda: left_running(tmp_path) == [], timeout_s=10)


def test_a_plan_fills_in_addresses_below_the_ephemeral_range_and_reads_back(tmp_path):
    config = run_config.load(RUN_FILE, overrides={"run.id": "plan", "run.directory": str(tmp_path)})
    run = local_run.plan(config)
    names = ["redis", "env-guess_number", "trainer", "engine-0", "gateway-0"]
    assert [command.name for command in run.commands] == names
    assert [[command.name for command in stage] for stage in run.stages] == [
        ["trainer"],
        ["gateway-0"],
        ["engine-0", "env-guess_number"],
        ["redis"],
    ]
    ports = re.findall(r"127\.0\.0\.1:(\d+)", " ".join(" ".join(command.arguments) for command in run.commands))
    assert len(set(ports)) == len(ports)
    assert all(10_000 <= int(port) < 32_768 for port in ports)
    tuned = {command.name for command in run.commands if "MALLOC_MMAP_THRESHOLD_" in command.environment}
    assert tuned == {"trainer", "engine-0"}
    local_run.write(run)
    assert (run.folder / "config.yaml").stat().st_mode & 0o077 == 0
    assert run_config.load(run.folder / "config.yaml") == run.config


def test_a_plan_finds_ports_where_the_kernel_gives_nearly_all_to_outgoing_connections(tmp_path):
    (tmp_path / "range").write_text("1024\t65535\n")
    port = next(local_run.free_ports(tmp_path / "range"))
    assert 10_000 <= port <= 65_535


def test_a_plan_starts_nothing_that_has_an_address(tmp_path):
    overrides = {
        "run.id": "plan",
        "redis.url": "redis://elsewhere:6379/0",
        "inference.addresses": ["elsewhere:1"],
        "environments.guess_number.address": "elsewhere:2",
        "rollout.replicas": 2,
    }
    run = local_run.plan(run_config.load(RUN_FILE, overrides=overrides))
    assert [command.name for command in run.commands] == ["trainer", "gateway-0", "gateway-1"]
    assert run.config.redis.url == "redis://elsewhere:6379/0"


def test_agents_outside_get_a_port_at_each_gateway_and_no_server(tmp_path):
    overrides = {
        "run.id": "plan",
        "run.directory": str(tmp_path),
        "environments.agents": {"driver": "external"},
        "rollout.replicas": 2,
    }
    run = local_run.plan(run_config.load(RUN_FILE, overrides=overrides))
    assert [command.name for command in run.environments] == ["env-guess_number"]
    ports = [gateway.arguments[gateway.arguments.index("--openai-listen") + 1] for gateway in run.gateways]
    assert len(set(ports)) == 2


def test_vllm_servers_are_not_started(tmp_path):
    overrides = {"run.id": "plan", "run.directory": str(tmp_path), "inference.dialect": "vllm"}
    with pytest.raises(StartupError, match=r"inference\.addresses: is empty; with inference\.dialect vllm"):
        local_run.plan(run_config.load(RUN_FILE, overrides=overrides))


async def test_a_replica_that_cannot_be_kept_up_is_left_behind_while_another_does_its_work(tmp_path):
    overrides = {"run.id": "r", "run.directory": str(tmp_path), "inference.replicas": 3}
    run = local_run.plan(run_config.load(RUN_FILE, overrides=overrides))
    loop = asyncio.get_running_loop()
    ends = {command.name: loop.create_future() for command in run.commands}
    fleet = {command.name: Process(command, report=lambda line: None, started=lambda: None) for command in run.commands}

    async def end(name):
        return await ends[name]

    output = io.StringIO()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        stopped = tasks.create_task(asyncio.Event().wait())
        running = {tasks.create_task(end(name)): fleet[name] for name in fleet}
        waiting = tasks.create_task(launch._wait_for_end(run, running, stopped, Display(output)))
        ends["engine-1"].set_result(-9)
        await asyncio.sleep(0.01)
        ends["engine-0"].set_result(1)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        ends["engine-2"].set_result(1)
        assert await waiting == [(fleet["engine-2"], 1)]
        stopped.cancel()
        for task in running:
            task.cancel()
    text = output.getvalue()
    assert "engine-1 was killed by SIGKILL again and again" in text and "going on with engine-0, engine-2" in text
    assert "engine-0 exited with code 1 again and again" in text and "going on with engine-2" in text
