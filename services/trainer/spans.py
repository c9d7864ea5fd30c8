"""What the trainer adds to traces once a step is done."""

from __future__ import annotations

from collections.abc import Sequence

from headrace import tracing
from services.trainer.report import StepReport
from services.trainer.verdict import LearnableGroup


def trained(groups: Sequence[LearnableGroup], report: StepReport) -> None:
    """A trace of the step, and in the trace of each trajectory that entered the loss a span; linked both ways."""
    recorder = tracing.recorder()
    if recorder is None:
        return
    end_ns = int(report.time_s * 1e9)
    start_ns = end_ns - int(report.step_s * 1e9)
    ids = [
        tracing.trajectory_ids(recorder.run_id, sample.trajectory_id, group.gateway)
        for group in groups
        for sample in group.samples
    ]
    episodes = list(filter(recorder.samples, ids))
    step = recorder.completed(
        "train step",
        start_ns,
        end_ns,
        links=episodes,
        step=report.step,
        policy_version=report.policy_version,
        waiting_s=report.waiting_s,
        packing_s=report.packing_s,
        compute_s=report.compute_s,
        publishing_s=report.publishing_s,
    )
    for episode in episodes:
        recorder.completed("train", start_ns, end_ns, parent=episode, links=[step], step=report.step)
