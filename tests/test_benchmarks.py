"""The arithmetic of benchmarks/loop.py and what it writes."""

import json

import pytest

from benchmarks import loop, results
from benchmarks.results import Figure
from headrace.step_log import Step


def step(number: int, *, done_s: float, idle: float) -> Step:
    return Step(
        step=number,
        time_s=done_s,
        step_s=2.0,
        reward_mean=0.0,
        trajectories=16,
        action_tokens=0,
        idle_fraction=idle,
        staleness_mean=0.0,
        staleness_max=0,
    )


def test_only_steps_after_the_warm_up_count():
    steps = [step(1, done_s=50, idle=1.0), step(2, done_s=52, idle=0.5), step(3, done_s=54, idle=0.5)]
    measured = loop.steady(steps, 1)
    assert measured.trajectories_per_s == pytest.approx(8.0)
    assert measured.trainer_idle_fraction == pytest.approx(0.5)
    assert measured.train_s == pytest.approx(1.0)


def test_the_bound_is_the_tighter_of_two():
    slow, fast = loop.Loop(1.0, 0.0, train_s=4.0), loop.Loop(1.0, 0.0, train_s=0.01)
    assert slow.bound_per_s == pytest.approx(4.0)
    assert fast.bound_per_s == pytest.approx(64 / 2.2)


def test_a_group_takes_as_long_as_its_slowest_episode():
    assert 3.3 < loop.mean_group_s(5000) < 3.8
    assert loop.admission(3, loop.Loop(1.0, 0.0, train_s=1.0)) == pytest.approx(64 / (loop.mean_group_s() + 1.0))


def test_results_are_a_table_and_a_file(tmp_path):
    assert results.table(["", "a"], [["x", "1.00"], ["long", "2"]]).splitlines() == [
        "         a",
        "----  ----",
        "x     1.00",
        "long     2",
    ]
    path = results.write("some", [Figure("speed", 2.0, 1.0, None, "1/s")], folder=tmp_path)
    assert json.loads(path.read_text()) == {"speed": {"ours": 2.0, "rival": 1.0, "limit": None, "unit": "1/s"}}
    results.write("some", [Figure("other", 1.0, None, 3.0, "1")], folder=tmp_path)
    assert set(json.loads(path.read_text())) == {"speed", "other"}
