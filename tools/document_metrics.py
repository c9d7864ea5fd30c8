"""Writes docs/metrics.md: every Prometheus metric that a service exports, from the code that exports it.

python -m tools.document_metrics
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

_HEAD = """# Metrics

Every service serves Prometheus metrics at `/metrics`: trainer, gateways and environments on `--metrics-listen`, engines
on their HTTP port. This page is made from the code by `make metrics`; a counter's samples end in `_total`, a
histogram's in `_bucket`, `_sum` and `_count`. The dashboard in `k8s/headrace/files/dashboard.json` draws them. What
happened to a single trajectory is told by traces: [tracing.md](tracing.md).
"""


class Family(NamedTuple):
    """One metric."""

    service: str
    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def samples(self) -> tuple[str, ...]:
        """Names that a query may use."""
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(self.kind, ("",))
        return tuple(self.name + suffix for suffix in suffixes)


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    """The page as it should be."""
    lines = [_HEAD]
    service = ""
    for family in families():
        if family.service != service:
            service = family.service
            lines += [f"\n## services/{service}\n", "| metric | kind | labels | what it is |", "|---|---|---|---|"]
        labels = ", ".join(f"`{label}`" for label in family.labels)
        lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.text} |")
    return "\n".join(lines) + "\n"


def families() -> list[Family]:
    """All of them, by service and name."""
    declared = [("envs", "metrics"), ("rollout", "metrics"), ("trainer", "exposition")]
    return sorted([*(family for place in declared for family in _declared(*place)), *_inference(), *_trainer()])


def _declared(service: str, module: str) -> Iterator[Family]:
    """Metrics that a module declares as its variables."""
    for value in vars(importlib.import_module(f"services.{service}.{module}")).values():
        if isinstance(value, MetricWrapperBase):
            yield from _of(service, value)


def _inference() -> Iterator[Family]:
    from services.inference.metrics import Metrics

    class Load:
        running = waiting = kv_used_tokens = kv_capacity_tokens = 0

    class Engine:
        load = Load()
        generated_tokens = prompt_tokens = recomputed_tokens = programs = 0
        policy_version: int | None = 0

    metrics = Metrics()
    metrics.source = Engine()
    for collector in set(metrics.registry._collector_to_names):
        yield from _of("inference", collector)


def _trainer() -> Iterator[Family]:
    from services.trainer.exposition import StatusCollector
    from services.trainer.journal import Journal
    from services.trainer.ledger import Ledger
    from services.trainer.server import Engines
    from services.trainer.status import Status

    with tempfile.TemporaryDirectory() as folder:
        collector = StatusCollector(Status("run", 1), Ledger(Journal(Path(folder) / "consumed.jsonl")), Engines())
        yield from _of("trainer", collector)


def _of(service: str, collector: Collector) -> Iterator[Family]:
    for family in collector.collect():
        labels = getattr(family, "_labelnames", ()) or getattr(collector, "_labelnames", ())
        yield Family(service, family.name, family.type, tuple(labels), family.documentation)


if __name__ == "__main__":
    main()
