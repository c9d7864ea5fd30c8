"""Section `environments`: one entry for each environment of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    max_concurrent_episodes: Count = Field(1024, description="episodes that one server runs at once")

    @model_validator(mode="after")
    def _reachable(self) -> Environment:
        if not self.implementation and not self.address:
            raise ValueError("set `class` (we serve it) or `address` (somebody does)")
        return self
