"""The trainer's Prometheus metrics, read from its status whenever somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.trainer.ledger import Ledger
from services.trainer.server import Engines
from services.trainer.status import Status

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
