"""What a run's step log says, summed up and drawn."""

import json

from headrace import plot, step_log, summary
from headrace.step_log import Step


def steps(*rewards: float) -> list[Step]:
    return [
        Step(
            step=number,
            time_s=float(number),
            step_s=2.0,
            reward_mean=reward,
            trajectories=8,
            action_tokens=100,
            idle_fraction=0.5,
            staleness_mean=0.5,
            staleness_max=1,
        )
        for number, reward in enumerate(rewards, start=1)
    ]


def test_the_log_is_read_in_order_and_a_repeated_step_counts_once(tmp_path):
    path = tmp_path / step_log.NAME
    assert step_log.read(path) == []
    lines = [{"step": 2, "reward_mean": 0.1}, {"step": 1, "reward_mean": 0.0}, {"step": 2, "reward_mean": 0.2}]
    lines.append({"step": 2, "evaluation_reward": 0.5})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "rew')
    assert [(step.step, step.reward_mean) for step in step_log.read(path)] == [(1, 0.0), (2, 0.2)]


def test_the_summary_compares_the_first_and_the_last_steps():
    text = "\n".join(summary.lines(steps(*[0.0] * 10, *[1.0] * 10), wall_s=65, restarts=2, results={}))
    assert "reward      0.000 -> 1.000 (means of 4 steps)" in text
    assert "20 in 1 min 5 s, 0.50 steps/s" in text
    assert "160 trained on, 50 sampled tokens/s" in text
    assert "idle 50%" in text
    assert "restarts    2" in text


def test_a_run_without_steps_still_has_a_summary(tmp_path):
    results = {"logs": tmp_path, "policy": tmp_path / "policy"}
    assert summary.lines([], wall_s=3, restarts=0, results=results) == [
        "No step was done in 3.0 s.",
        f"logs        {tmp_path}",
    ]


def test_the_plot_is_a_png(tmp_path):
    path = tmp_path / "reward.png"
    plot.draw(steps(0.1, 0.5, 0.9), path, title="run", ceiling=0.5, ceiling_label="best without feedback")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_moving_mean():
    assert plot.moving_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]
