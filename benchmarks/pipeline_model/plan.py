"""What is simulated: a pipeline of given sizes. Times in seconds, amounts in bytes or tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """A lognormal quantity; with sigma 0 it is always its mean."""

    mean: float
    sigma: float = 0.0  # deviation of its logarithm


@dataclass(frozen=True)
class EngineSpeed:
    """A batching engine: one decode step gives each of n running requests a token, and takes base_s + n · request_s."""

    base_s: float
    request_s: float = 0.0
    max_running: int = 1_000_000  # further requests wait in the engine
    prefill_s: float = 0.0  # of one request: it holds up everybody's decoding

    def step_s(self, running: int) -> float:
        """Seconds of a decode step."""
        return self.base_s + running * self.request_s

    @property
    def tokens_per_s(self) -> float:
        """Of an engine that is full."""
        return self.max_running / self.step_s(self.max_running)


@dataclass(frozen=True)
class Weights:
    """How a version gets from the trainer to the engines."""

    size_bytes: float
    egress_bytes_per_s: float  # of the trainer, all pulls together
    stream_bytes_per_s: float  # of one pull, and of what an engine sends to its peers
    delta_fraction: float = 1.0  # bytes of a version's difference from the one before; 1: always the full snapshot
    fan_out: int = 0  # peers that an engine sends a version to; 0: everyone pulls from the trainer
    piece_fraction: float = 1.0  # share of the largest tensor: an engine passes it on when it has come whole
    snapshot_s: float = 0.0  # the trainer copies and hashes
    stage_s: float = 0.0  # an engine checks and stages, while it serves
    swap_s: float = 0.0  # an engine stands still


@dataclass(frozen=True)
class Bus:
    """Redis, which does one thing at a time."""

    entry_s: float = 0.0  # of a ticket or a group, from XADD to XDEL
    byte_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """One pipeline and what it works on."""

    engines: int
    gateways: int
    slots: int  # episodes that one gateway runs at once
    group_size: int
    groups_per_step: int
    max_staleness: int
    turns: int
    action_tokens: Sample  # of one turn
    environment_s: Sample  # of one step
    engine: EngineSpeed
    weights: Weights
    group_train_s: float  # what the trainer spends on one group
    update_s: float = 0.0  # and on a step besides
    gateway_step_s: float = 0.0  # processor time of a gateway for one turn
    bus: Bus = Bus()
    group_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.slots < self.group_size:
            raise ValueError("slots must be at least group_size: no gateway could claim a ticket")

    @property
    def episodes_per_step(self) -> int:
        """Episodes that a step learns from."""
        return self.groups_per_step * self.group_size

    @property
    def train_s(self) -> float:
        """A step whose groups have all been waiting for it, publication included."""
        return self.groups_per_step * self.group_train_s + self.update_s + self.weights.snapshot_s

    @property
    def max_episodes(self) -> int:
        """Episodes that run at once, as tickets and slots allow."""
        places = self.gateways * (self.slots // self.group_size * self.group_size)
        return min((self.max_staleness + 1) * self.episodes_per_step, places)
