"""Sections `run`, `redis` and `telemetry`: the name, the folder, the bus, the logs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from headrace.config.section import Fraction, Seconds, Section


class Run(Section):
    """What the run is called and where it writes."""

    id: str = Field(
        "", description="namespace in Redis and name of the run's folder; `headrace run` makes one if empty"
    )
    directory: Path = Field(Path("runs"), description="folder that holds the run's folder; a bucket must be mounted")
    seed: int = Field(0, ge=0, description="seed of initial weights, order of tasks and what environments draw")

    @field_validator("id")
    @classmethod
    def _id_is_a_name(cls, value: str) -> str:
        if value and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", value):
            raise ValueError("must be lower-case letters, digits and hyphens, at most 63 of them")
        return value

    @field_validator("directory")
    @classmethod
    def _directory_is_a_path(cls, value: Path) -> Path:
        if re.match(r"[a-z0-9]+:/", str(value)):
            raise ValueError("must be a path; mount the bucket and give the folder where it is mounted")
        return value

    @property
    def path(self) -> Path:
        """The run's own folder."""
        return self.directory / self.id


class Redis(Section):
    """The bus between gateways and trainer."""

    url: str = Field("", description="redis://host:port/db; empty: `headrace run` starts a server")
    timeout_s: Seconds = 10.0

    @property
    def place(self) -> str:
        """The url without user, password and options: for messages."""
        return re.sub(r"//.*@", "//", self.url.partition("?")[0])


class Traces(Section):
    """OpenTelemetry traces of trajectories: off without an endpoint."""

    endpoint: str = Field("", description="http(s)://host:port of a collector (OTLP over HTTP); empty: no traces")
    sample_ratio: Fraction = Field(1.0, description="share of the trajectories that are traced")

    @field_validator("endpoint")
    @classmethod
    def _endpoint_is_a_url(cls, value: str) -> str:
        if value and not re.match(r"https?://[^/]", value):
            raise ValueError("must be http://HOST:PORT or https://HOST:PORT of a collector, or empty")
        return value


class Telemetry(Section):
    """Logs, metrics, traces and the reward plot."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    tensorboard: bool = True
    plot_ceiling: float | None = Field(None, description="reward that the reward plot marks with a line")
    plot_ceiling_label: str = Field("", description="what that reward means")
    traces: Traces = Traces()
