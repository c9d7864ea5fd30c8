"""The engine's Prometheus metrics: what it is doing, read at each scrape, and what it has done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Readings(Protocol):
    """What is read at a scrape."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_used_tokens(self) -> int: ...
    @property
    def kv_capacity_tokens(self) -> int: ...


class Source(Protocol):
    """The engine, as far as metrics know it."""

    @property
    def load(self) -> Readings: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def recomputed_tokens(self) -> int: ...
    @property
    def programs(self) -> int: ...
    @property
    def policy_version(self) -> int | None: ...


class Metrics:
    """The process's metrics; `source` joins when the engine is up."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self.source: Source | None = None
        self._requests = prometheus_client.Counter(
            "headrace_inference_requests",
            "Requests to /generate that were answered, by HTTP status (499: the client left)",
            ["status"],
            registry=self.registry,
        )
        self._pulls = prometheus_client.Counter(
            "headrace_inference_pulls", "Pulls of weights, by outcome", ["outcome"], registry=self.registry
        )
        self._pull_seconds = prometheus_client.Histogram(
            "headrace_inference_pull_seconds",
            "Time from an announcement to checked weights in memory",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._pulled_bytes = prometheus_client.Counter(
            "headrace_inference_pulled_bytes",
            "Bytes of weights received, by sender (trainer, peer) and kind (full, delta)",
            ["sender", "kind"],
            registry=self.registry,
        )
        self._pull_fallbacks = prometheus_client.Counter(
            "headrace_inference_pull_fallbacks",
            "Pulls that went on another way, by cause: a peer that was dead, slow, corrupt, of the wrong_run or whose"
            " version was gone; a delta that was damaged; a bulk port out of reach",
            ["cause"],
            registry=self.registry,
        )
        self._stage_seconds = prometheus_client.Histogram(
            "headrace_inference_stage_seconds",
            "Time to bring checked weights onto the device, while serving",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._swap_seconds = prometheus_client.Histogram(
            "headrace_inference_swap_seconds",
            "Time from staged weights to their use, the running step included",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._returns = prometheus_client.Counter(
            "headrace_inference_returns_to_older_weights",
            "Versions whose content an older version had: the trainer has gone back to an older step",
            registry=self.registry,
        )
        self.registry.register(self)  # type: ignore[arg-type]

    def answered(self, status: int) -> None:
        """A request to /generate has been answered."""
        self._requests.labels(status).inc()

    def pulled(self, outcome: str, seconds: float) -> None:
        """A pull has ended."""
        self._pulls.labels(outcome).inc()
        if outcome == "ok":
            self._pull_seconds.observe(seconds)

    def received(self, sender: str, kind: str, size_bytes: int) -> None:
        """Bytes of weights have come."""
        self._pulled_bytes.labels(sender, kind).inc(size_bytes)

    def fell_back(self, cause: str) -> None:
        """A pull goes on another way."""
        self._pull_fallbacks.labels(cause).inc()

    def installed(self, stage_seconds: float, swap_seconds: float) -> None:
        """A version is in use."""
        self._stage_seconds.observe(stage_seconds)
        self._swap_seconds.observe(swap_seconds)

    def returned_to_older_weights(self) -> None:
        """A version has come whose content an older one had."""
        self._returns.inc()

    def text(self) -> bytes:
        """All of it, in Prometheus's text format."""
        return prometheus_client.generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """What Prometheus's client asks of a collector."""
        source = self.source
        if source is None:
            return
        load = source.load
        for name, text, value in (
            ("running_requests", "Requests that are being computed", load.running),
            ("waiting_requests", "Requests that wait for room in a batch", load.waiting),
            ("kv_used_tokens", "Slots of the key-value cache that running requests hold", load.kv_used_tokens),
            ("kv_capacity_tokens", "Slots of the key-value cache", load.kv_capacity_tokens),
        ):
            yield GaugeMetricFamily(f"headrace_inference_{name}", text, value=value)
        if source.policy_version is not None:
            yield GaugeMetricFamily(
                "headrace_inference_policy_version", "Version of the weights in use", value=source.policy_version
            )
        for name, text, value in (
            ("generated_tokens", "Tokens sampled", source.generated_tokens),
            ("prompt_tokens", "Prompt tokens of all requests, cached ones included", source.prompt_tokens),
            (
                "recomputed_tokens",
                "Tokens of running requests that swaps sent back to be prefilled again (inference.update: recompute)",
                source.recomputed_tokens,
            ),
            ("programs", "Programs that JAX has built or loaded; constant once the engine is ready", source.programs),
        ):
            yield CounterMetricFamily(f"headrace_inference_{name}", text, value=value)
