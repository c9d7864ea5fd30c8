"""Writes the run files that the containers of compose.yaml read: a run's config with their addresses filled in.

    python -m tools.compose_run configs/guess_number.yaml FOLDER

run.yaml is for trainer and gateway; run-without-redis.yaml is the same for those who must not know the bus.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace import config

REDIS = "redis:6379"
TRAINER = "trainer:50051"
ENGINE = "inference:30000"
ENVIRONMENT = "environment:50051"
# The container's Redis has 256 MB. Groups that wait there for a checkpoint leave most of it to those to come.
MAX_UNACKNOWLEDGED_BYTES = 64 * 1024 * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the run files of compose.yaml.")
    parser.add_argument("source", type=Path, help="a run file with one environment")
    parser.add_argument("folder", type=Path, help="gets the files")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replaces a number of the file")
    args = parser.parse_args()
    overrides = {key: float(value) for key, _, value in (item.partition("=") for item in args.set)}
    try:
        run = for_containers(config.load(args.source, overrides=overrides))
    except config.ConfigError as error:
        raise SystemExit(f"error: {error}") from error
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "run.yaml").write_text(config.dump(run))
    closed = run.model_copy(update={"redis": run.redis.model_copy(update={"url": ""})})
    (args.folder / "run-without-redis.yaml").write_text(config.dump(closed))


def for_containers(run: config.Config) -> config.Config:
    """The same run, served by the containers. Raises ConfigError for what they do not serve."""
    if len(run.environments) != 1:
        raise config.ConfigError("compose.yaml", ["environments: it serves exactly one"])
    (key,) = run.environments
    if key != "guess_number":
        raise config.ConfigError("compose.yaml", [f"environments.{key}: it serves guess_number"])
    checkpoint = run.trainer.checkpoint.model_copy(update={"max_unacknowledged_bytes": MAX_UNACKNOWLEDGED_BYTES})
    parts = {
        "run": {"id": run.run.id or "compose", "directory": Path("/var/lib/headrace")},
        "trainer": {"address": TRAINER, "checkpoint": checkpoint},
        "inference": {"addresses": [ENGINE]},
        "redis": {"url": f"redis://{REDIS}/0"},
    }
    sections = {name: getattr(run, name).model_copy(update=changes) for name, changes in parts.items()}
    environment = run.environments[key].model_copy(update={"address": ENVIRONMENT})
    return run.model_copy(update={**sections, "environments": {key: environment}})


if __name__ == "__main__":
    main()
