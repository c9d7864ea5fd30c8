"""Section `environments`: one entry for each environment of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from headrace.config.section import Address, Count, Seconds, Section


class Environment(Section):
    """One environment of the run; its key is the name that tasks carry."""

    implementation: str = Field("", alias="class", description="name in services/envs/catalog.py or module:Class")
    address: Address = Field("", description="host:port of its server; empty: `headrace run` starts one")
    options: dict[str, Any] = Field({}, description="keyword arguments of the class")
    split: str = "train"
    task_count: Count | None = Field(
        None,
        description="tasks of the split, each visited once an epoch in shuffled order; empty: drawn from run.seed",
    )
    weight: float = Field(1.0, gt=0, description="share of the run's tasks, relative to the others'")
    max_turns: Count = 8
    reset_timeout_s: Seconds = 60.0
    step_timeout_s: Seconds = 60.0
    tls: bool | None = Field(None, description="whether its server speaks TLS; empty: as security.tls is set")
    token_file: Path | None = Field(
        None, description="file with the token that its server asks of gateways: its own, for it learns no other"
    )
    driver: Literal["gateway", "external"] = Field(
        "gateway",
        description="who drives its episodes: the gateway, against an environment's server; or agents outside, which"
        " open sessions at the gateways' --openai-listen, bring their own environment and give the reward",
    )
    gateway_max_episodes: Count | None = Field(
        None, description="its episodes that one gateway runs at once; empty: as many as the gateway runs of all"
    )
    episode_attempts: Count | None = Field(None, description="in place of rollout.episode_attempts")
    episode_timeout_s: Seconds | None = Field(None, description="in place of rollout.episode_timeout_s")
    max_concurrent_episodes: Count = Field(1024, description="episodes that one server runs at once")

    @model_validator(mode="after")
    def _reachable(self) -> Environment:
        served = bool(self.implementation or self.address)
        if self.driver == "external" and served:
            raise ValueError("driver: external has neither `class` nor `address`: its agents bring their environment")
        if self.driver == "gateway" and not served:
            raise ValueError("set `class` (we serve it), `address` (somebody does) or `driver: external`")
        return self
