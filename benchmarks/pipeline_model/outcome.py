"""What a simulated pipeline did while it was steady."""

from __future__ import annotations

from dataclasses import dataclass

SATURATED = 0.9  # of its time a resource is busy


@dataclass(frozen=True)
class Tickets:
    """Where every ticket went, from the start of the simulation to its end."""

    issued: int
    trained: int
    returned: int  # too stale when the trainer came to them
    outstanding: int


@dataclass(frozen=True)
class Outcome:
    """Rates and shares of the steps after the warm-up."""

    steps: int
    seconds: float
    trajectories_per_s: float  # trained on
    returned_fraction: float  # of the groups that reached the trainer
    episodes_running: float  # mean
    episode_s: float  # mean, from claim to end
    episodes_ended: int
    step_s: float
    tokens_by_age: tuple[int, ...]  # trained action tokens, by the versions between their weights and the trainer's
    max_age: int
    # Shares of time, or of what is possible.
    engine_busy: float
    trainer_busy: float
    egress_busy: float
    redis_busy: float
    gateway_busy: float  # of the busiest gateway
    redis_bytes_per_s: float  # in and out
    redis_entries_per_s: float
    egress_bytes_per_s: float
    lag: float  # versions that engines are behind the newest, mean over tokens sampled
    tickets: Tickets

    @property
    def mean_age(self) -> float:
        """Versions, over trained tokens."""
        total = sum(self.tokens_by_age)
        return sum(age * tokens for age, tokens in enumerate(self.tokens_by_age)) / total if total else 0.0

    @property
    def bottleneck(self) -> str:
        """The saturated resource, or what holds the pipeline back when none is."""
        shares = {
            "engines": self.engine_busy,
            "trainer": self.trainer_busy,
            "trainer's network": self.egress_busy,
            "Redis": self.redis_busy,
            "gateways": self.gateway_busy,
        }
        name = max(shares, key=lambda key: shares[key])
        return name if shares[name] >= SATURATED else "staleness"
