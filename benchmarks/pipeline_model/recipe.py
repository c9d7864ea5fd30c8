"""Plans made from the inputs: the agent that the page docs/scale.md sizes.

An episode has a prompt and several turns of action and observation; the engine keeps the prefix, so it prefills only
what is new. A decode step reads the weights once and each running request's keys and values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.pipeline_model.inputs import Inputs
from benchmarks.pipeline_model.plan import Bus, EngineSpeed, Plan, Sample, Weights

GROUP = 8
GROUPS_PER_ENGINE = 4  # of a step: at max_staleness 2 that is 96 episodes in flight for each engine


@dataclass(frozen=True)
class Workload:
    """Tokens and seconds of an episode."""

    turns: int
    prompt_tokens: int
    action_tokens: Sample
    observed_tokens: int  # of one turn
    environment_s: Sample

    @property
    def actions(self) -> float:
        """Action tokens of an episode."""
        return self.turns * self.action_tokens.mean

    @property
    def observations(self) -> float:
        """All its other tokens."""
        return self.prompt_tokens + self.turns * self.observed_tokens

    @property
    def tokens(self) -> float:
        """All of them."""
        return self.actions + self.observations


# An agent that calls tools; one whose tools now and then take very long; one whose turns are a word.
TOOLS = Workload(4, 256, Sample(256, 0.6), 128, Sample(2.0, 1.0))
STRAGGLERS = Workload(4, 256, Sample(256, 0.6), 128, Sample(5.0, 1.5))
SHORT = Workload(4, 64, Sample(8), 8, Sample(0.02, 0.5))


@dataclass(frozen=True)
class Publication:
    """How weights travel."""

    name: str
    delta: bool
    fan_out: int

    @property
    def slug(self) -> str:
        """Its name within a metric's."""
        return re.sub(r"\W+", "_", self.name)


PUBLICATIONS = (
    Publication("full", delta=False, fan_out=0),
    Publication("full, fan-out 2", delta=False, fan_out=2),
    Publication("delta", delta=True, fan_out=0),
    Publication("delta, fan-out 2", delta=True, fan_out=2),
)


def plan(
    inputs: Inputs,
    workload: Workload,
    *,
    engines: int,
    trainer_chips: float,
    publication: Publication = PUBLICATIONS[-1],
    max_staleness: int = 2,
    groups_per_step: int | None = None,
    gateways: int | None = None,
) -> Plan:
    """The pipeline of so many engines. Without `gateways` there are enough for every ticket."""
    groups = groups_per_step or GROUPS_PER_ENGINE * engines
    slots = int(inputs.slots.value)
    episodes = (max_staleness + 1) * groups * GROUP
    size = group_bytes(inputs, workload)
    return Plan(
        engines=engines,
        gateways=gateways or -(-episodes // slots),
        slots=slots,
        group_size=GROUP,
        groups_per_step=groups,
        max_staleness=max_staleness,
        turns=workload.turns,
        action_tokens=workload.action_tokens,
        environment_s=workload.environment_s,
        engine=engine_speed(inputs, workload),
        weights=weights(inputs, publication),
        group_train_s=group_train_s(inputs, workload, trainer_chips),
        gateway_step_s=inputs.gateway_step_s.value,
        bus=Bus(entry_s=inputs.redis_entry_s.value / 2, byte_s=inputs.redis_byte_s.value),  # a ticket, then a group
        group_bytes=size,
    )


def engine_speed(inputs: Inputs, workload: Workload) -> EngineSpeed:
    """A chip's decode step and prefill."""
    read_s = 1 / (inputs.hbm_bytes_per_s.value * inputs.decode_efficiency.value)
    new_tokens = workload.observations / workload.turns
    flops = 2 * inputs.parameters.value * new_tokens
    return EngineSpeed(
        base_s=weight_bytes(inputs) * read_s,
        request_s=inputs.kv_bytes_per_token.value * workload.tokens / 2 * read_s,
        max_running=int(inputs.max_running.value),
        prefill_s=flops / (inputs.peak_flops.value * inputs.compute_efficiency.value),
    )


def weights(inputs: Inputs, publication: Publication) -> Weights:
    """What a version costs to publish."""
    size = weight_bytes(inputs)
    return Weights(
        size_bytes=size,
        egress_bytes_per_s=inputs.egress_bytes_per_s.value,
        stream_bytes_per_s=inputs.stream_bytes_per_s.value,
        delta_fraction=inputs.delta_fraction.value if publication.delta else 1.0,
        fan_out=publication.fan_out,
        piece_fraction=inputs.piece_fraction.value,
        snapshot_s=size / inputs.copy_bytes_per_s.value,
        stage_s=size / inputs.copy_bytes_per_s.value,
        swap_s=inputs.swap_s.value,
    )


def group_train_s(inputs: Inputs, workload: Workload, chips: float) -> float:
    """A group's forward and backward pass, 6 FLOPs a parameter and token, and its way into the trainer."""
    flops = 6 * inputs.parameters.value * GROUP * workload.tokens
    ingest_s = inputs.ingest_group_s.value + group_bytes(inputs, workload) * inputs.ingest_byte_s.value
    return flops / (chips * inputs.peak_flops.value * inputs.compute_efficiency.value) + ingest_s


def group_bytes(inputs: Inputs, workload: Workload) -> float:
    """Of a group in Redis."""
    return GROUP * (
        workload.actions * inputs.bytes_per_action_token.value
        + workload.observations * inputs.bytes_per_observed_token.value
    )


def weight_bytes(inputs: Inputs) -> float:
    """Of the model in bfloat16."""
    return 2 * inputs.parameters.value
