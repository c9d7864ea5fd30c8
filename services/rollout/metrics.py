"""The gateway's Prometheus metrics, and the watch over its event loop.

The field's rule for names: headrace_rollout_<what>_<unit>. Nothing here blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from services.rollout.engine import Engine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_LAG_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 5)
_LAG_PERIOD_S = 0.1

claimed_tickets = Counter("headrace_rollout_claimed_tickets", "tickets claimed or taken over", ["how"])
lost_claims = Counter("headrace_rollout_lost_claims", "claims that another gateway took over")
published_groups = Counter("headrace_rollout_published_groups", "groups that ended their ticket")
fenced_groups = Counter("headrace_rollout_fenced_groups", "groups discarded because the ticket had already ended")
running_groups = Gauge("headrace_rollout_running_groups", "groups whose episodes run")
unpublished_groups = Gauge("headrace_rollout_unpublished_groups", "ended groups that wait for Redis")
redis_errors = Counter("headrace_rollout_redis_errors", "calls to Redis that failed")

waiting_episodes = Gauge(
    "headrace_rollout_waiting_episodes", "episodes that wait for a place at their environment", ["environment"]
)
failed_episodes = Counter(
    "headrace_rollout_failed_episodes", "episodes that ended in an error, by what failed", ["environment", "cause"]
)
running_episodes = Gauge("headrace_rollout_running_episodes", "episodes that run")
ended_episodes = Counter("headrace_rollout_ended_episodes", "episodes by how they ended", ["environment", "status"])
unrewarded_episodes = Counter(
    "headrace_rollout_unrewarded_episodes", "truncated episodes that no reward was given to", ["environment"]
)
episode_seconds = Histogram(
    "headrace_rollout_episode_seconds", "where an episode's time went", ["environment", "phase"], buckets=_SECONDS
)
environment_failures = Counter(
    "headrace_rollout_environment_failures", "environment sessions that failed", ["environment", "reason"]
)
malformed_tool_calls = Counter("headrace_rollout_malformed_tool_calls", "tool calls that could not be parsed")
sampled_tokens = Counter("headrace_rollout_sampled_tokens", "tokens that engines sampled")
undated_tokens = Counter(
    "headrace_rollout_undated_tokens", "tokens labelled with the older version because vLLM was updated during the call"
)

engine_calls = Counter("headrace_rollout_engine_calls", "calls to engines by outcome", ["outcome"])
open_engine_calls = Gauge(
    "headrace_rollout_open_engine_calls", "actions that wait for an engine or for its answer: what engines scale by"
)
waiting_engine_calls = Gauge("headrace_rollout_waiting_engine_calls", "calls that wait for a place at an engine")
engine_retries = Counter("headrace_rollout_engine_retries", "calls made because another had this outcome", ["cause"])
ready_engines = Gauge("headrace_rollout_ready_engines", "engines that answered their last readiness check")
engine_window = Gauge("headrace_rollout_engine_window", "calls that this gateway may keep at an engine", ["engine"])
engine_inflight = Gauge("headrace_rollout_engine_inflight", "calls that an engine is answering", ["engine"])
engine_circuit = Gauge(
    "headrace_rollout_engine_circuit", "an engine's circuit: 0 closed, 1 half open, 2 open", ["engine"]
)

event_loop_lag_seconds = Histogram(
    "headrace_rollout_event_loop_lag_seconds", "how late the event loop wakes a sleeper", buckets=_LAG_SECONDS
)


def show_engine(engine: Engine) -> None:
    """Has each scrape read the engine's window, calls and circuit."""
    engine_window.labels(engine.url).set_function(lambda: engine.window.size)
    engine_inflight.labels(engine.url).set_function(lambda: engine.running)
    engine_circuit.labels(engine.url).set_function(lambda: engine.circuit.state(time.monotonic()))


def forget_engine(engine: Engine) -> None:
    """The engine is gone."""
    for gauge in (engine_window, engine_inflight, engine_circuit):
        with contextlib.suppress(KeyError):
            gauge.remove(engine.url)


async def watch_event_loop() -> None:
    """Measures the event loop's lag until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + _LAG_PERIOD_S
        await asyncio.sleep(_LAG_PERIOD_S)
        event_loop_lag_seconds.observe(max(0.0, loop.time() - due_s))
