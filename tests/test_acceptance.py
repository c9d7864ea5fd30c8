"""`headrace run` with two engines, one of which is killed in the middle: the run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.loop_run import CACHE
from tests.processes import ROOT, wait_until

pytestmark = pytest.mark.timeout(600)


def run_and_kill_an_engine(
    folder: Path, *, kill_at_step: int, timeout_s: float, **changes: Any
) -> list[dict[str, Any]]:
    """The steps of a run of guess_number, of which engine-1 was killed once so many steps were made."""
    overrides = {
        "run.id": "killed",
        "run.directory": folder / "runs",
        "inference.replicas": 2,
        "inference.compilation_cache": CACHE,
        "telemetry.tensorboard": "false",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    command = [sys.executable, "-m", "headrace", "run", str(ROOT / "configs" / "guess_number.yaml")]
    for key, value in overrides.items():
        command += ["--set", f"{key}={value}"]
    metrics, entries = folder / "runs/killed/metrics.jsonl", folder / "runs/killed/processes.json"

    def steps() -> list[dict[str, Any]]:
        return [json.loads(line) for line in metrics.read_text().split("\n")[:-1]] if metrics.exists() else []

    launched = processes.Process(command, folder / "launched.log")
    try:
        wait_until(lambda: len(steps()) >= kill_at_step, timeout_s=timeout_s, process=launched)
        victim = next(entry for entry in json.loads(entries.read_text()) if entry["name"] == "engine-1")
        os.kill(victim["pid"], signal.SIGKILL)
        assert launched.wait(timeout_s) == 0, launched.output[-3000:]
    finally:
        launched.stop()
    assert re.search(r"engine-1 was killed by SIGKILL; starting it again \(1 of \d+\)", launched.output)
    restarts = {entry["name"]: entry["restarts"] for entry in json.loads(entries.read_text())}
    assert restarts.pop("engine-1") == 1 and set(restarts.values()) == {0}
    print(launched.output[-1500:])
    return steps()


def test_a_run_goes_on_when_one_of_its_engines_is_killed(tmp_path):
    steps = run_and_kill_an_engine(
        tmp_path,
        kill_at_step=3,
        timeout_s=240,
        trainer__steps=12,
        trainer__groups_per_step=8,
        trainer__max_staleness=0,
        trainer__minibatches=1,
        trainer__stop_at_reward="null",
        trainer__optimizer__warmup_steps=1,
    )
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert all(step["sampler_gap_max"] <= 1e-3 and step["staleness_max"] == 0 for step in steps)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_reaches_its_reward_although_an_engine_is_killed(tmp_path):
    steps = run_and_kill_an_engine(tmp_path, kill_at_step=20, timeout_s=1500)
    assert len(steps) < 200  # it ended by its rule
    assert sum(step["reward_mean"] for step in steps[-10:]) / 10 >= 0.95
