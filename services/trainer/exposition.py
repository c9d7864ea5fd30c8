"""The trainer's Prometheus metrics: what its status says, read whenever somebody asks, and what steps have added up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.trainer.ledger import Ledger
from services.trainer.server import Engines
from services.trainer.status import Status

if TYPE_CHECKING:  # it imports us
    from services.trainer.report import StepReport

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)
_PARTS = ("waiting", "packing", "compute", "publishing", "committing")

step_seconds = Histogram(
    "headrace_trainer_step_seconds",
    "wall time of a step by what it was spent on: waiting (for groups), packing, compute, publishing, committing (the"
    " checkpoint of the step before), other",
    ["part"],
    buckets=_SECONDS,
)
action_tokens = Counter("headrace_trainer_action_tokens", "tokens that entered the loss")
trajectories = Counter("headrace_trainer_trajectories", "trajectories that entered the loss")

_GAUGES = {
    "step": "optimizer batches done",
    "policy_version": "newest published version",
    "outstanding_tickets": "tickets without a terminal event plus groups not yet consumed",
    "reward_mean": "mean reward of the last step's trajectories",
    "idle_fraction": "share of the last step's wall time spent waiting for groups",
    "staleness_mean": "mean age of the last step's tokens in updates",
    "staleness_max": "age of the last step's oldest token in updates",
    "phase": "1 starting, 2 waiting, 3 training, 4 finished",
}


def count(report: StepReport) -> None:
    """Adds up a step that is done."""
    spent = {part: float(getattr(report, f"{part}_s")) for part in _PARTS}
    for part, seconds in {**spent, "other": max(0.0, report.step_s - sum(spent.values()))}.items():
        step_seconds.labels(part).observe(seconds)
    action_tokens.inc(report.action_tokens)
    trajectories.inc(report.trajectories)


class StatusCollector(Collector):
    """Translates the status; holds no numbers itself."""

    def __init__(self, status: Status, ledger: Ledger, engines: Engines):
        self._status, self._ledger, self._engines = status, ledger, engines

    def collect(self) -> Iterator[Metric]:
        """All metrics as they stand."""
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"headrace_trainer_{name}", text, float(getattr(self._status, name)))
        yield GaugeMetricFamily(
            "headrace_trainer_unacknowledged_bytes",
            "consumed groups that wait in Redis for a checkpoint",
            self._ledger.waiting_bytes,
        )
        evaluated = GaugeMetricFamily(
            "headrace_trainer_evaluation_reward", "mean reward of the last evaluation", labels=["environment"]
        )
        for environment, reward in self._status.evaluation_rewards.copy().items():
            evaluated.add_metric([environment], reward)
        yield evaluated
        yield CounterMetricFamily(
            "headrace_trainer_trained_groups", "groups that entered a gradient", self._status.trained_groups
        )
        returned = CounterMetricFamily(
            "headrace_trainer_returned_groups",
            "groups that ended without entering a gradient",
            labels=["environment", "reason"],
        )
        for key, count in self._status.returned_groups.copy().items():
            returned.add_metric(key, count)
        yield returned
        sent = CounterMetricFamily(
            "headrace_trainer_sent_weights_bytes",
            "bytes of weights sent to engines, by kind (full, delta)",
            labels=["kind"],
        )
        for kind, size_bytes in self._engines.sent_bytes.copy().items():
            sent.add_metric([kind], size_bytes)
        yield sent
        behind = GaugeMetricFamily(
            "headrace_trainer_engine_versions_behind",
            "versions that the engine is behind the newest one",
            labels=["engine"],
        )
        for engine, version in self._engines.versions.items():
            behind.add_metric([engine], self._status.policy_version - version)
        yield behind
