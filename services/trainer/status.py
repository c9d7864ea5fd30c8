"""What the trainer has done and does: written by the loop, read by the server and the metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from headrace.v1 import trainer_service_pb2 as pb


@dataclass
class Status:
    """Counts begin with the run, not with the process, unless they say otherwise."""

    run_id: str
    total_steps: int
    step: int = 0
    phase: pb.TrainerPhase = pb.TRAINER_PHASE_STARTING
    policy_version: int = 0
    outstanding_tickets: int = 0
    trained_groups: int = 0
    # Groups that ended without entering a gradient, by (environment, reason).
    returned_groups: Counter[tuple[str, str]] = field(default_factory=Counter)
    # Mean reward of each environment's last evaluation.
    evaluation_rewards: dict[str, float] = field(default_factory=dict)
    # Of the last step.
    reward_mean: float = 0.0
    idle_fraction: float = 0.0
    staleness_mean: float = 0.0
    staleness_max: int = 0

    def returned_by_reason(self) -> Counter[str]:
        """Returned groups of all environments together."""
        reasons: Counter[str] = Counter()
        for (_, reason), count in self.returned_groups.items():
            reasons[reason] += count
        return reasons
