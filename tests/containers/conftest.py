"""The loop in containers, as compose.yaml brings it up, for the session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import docker
import pytest
from docker.models.containers import Container

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / ".cache" / "k8s" / "venv" / "bin" / "docker-compose"
BASE_IMAGE = os.environ.get("BASE_IMAGE", "python:3.12-slim")
STEPS = 2000  # more than the tests wait for


# In the order in which a ticket moves, so that none slips through between two looks.
_COUNT_TICKETS = """
import json, pathlib, redis
from headrace import config
from headrace.v1.trajectory_pb2 import Task, TrajectoryGroup
run = config.load("/etc/headrace/run.yaml")
bus = redis.Redis.from_url(run.redis.url)
key = "headrace:{" + run.run.id + "}:"
issued = list(range(int(bus.hget(key + "state", "cursor") or 0)))
out = [int(Task.FromString(entry[b"record"]).task_id) for _, entry in bus.xrange(key + "tasks")]
groups = [int(TrajectoryGroup.FromString(entry[b"record"]).task.task_id) for _, entry in bus.xrange(key + "groups")]
def lines(name):
    path = run.run.path / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
returned = [int(line["task_id"]) for line in lines("returned.jsonl")]
learned = [int(group["task_id"]) for line in lines("consumed.jsonl") for group in line["groups"]]
assert len(set(learned)) == len(learned), "a ticket was learned from twice"
print(json.dumps([issued, out, groups, learned, returned]))
"""


@dataclass(frozen=True)
class Tickets:
    """Numbers of tickets."""

    issued: frozenset[int]
    # Wait in Redis or are claimed; have a group in Redis; the policy has learned from it; it was returned.
    out: frozenset[int]
    ended: frozenset[int]
    learned: frozenset[int]
    returned: frozenset[int]

    @property
    def lost(self) -> frozenset[int]:
        """Those that are nowhere."""
        return self.issued - self.out - self.ended - self.learned - self.returned


class Stack:
    """The running containers."""

    def __init__(self, client: docker.DockerClient, environment: dict[str, str]):
        self._client, self._environment = client, environment

    def compose(self, *arguments: str, timeout_s: float = 600) -> str:
        """Runs docker-compose on the project; returns what it prints."""
        done = subprocess.run(
            [str(COMPOSE), "--project-name", "headrace-test", *arguments],
            cwd=ROOT,
            env={**os.environ, **self._environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def container(self, service: str) -> Container:
        """The one container of a service, as it is now."""
        return self._client.containers.get(f"headrace-test-{service}-1")

    def networks(self, service: str) -> dict[str, bool]:
        """A service's networks, and whether each is internal."""
        names = self.container(service).attrs["NetworkSettings"]["Networks"]
        return {name: self._client.networks.get(name).attrs["Internal"] for name in names}

    def python(self, service: str, program: str) -> str:
        """What a Python program prints in a service's container."""
        done = self.container(service).exec_run(["python", "-c", program])
        assert done.exit_code == 0, done.output.decode()
        return done.output.decode().strip()

    def steps(self) -> list[int]:
        """Numbers of the steps that the trainer has logged."""
        program = (
            "import pathlib; p = pathlib.Path('/var/lib/headrace/compose/metrics.jsonl');"
            " print(p.read_text() if p.exists() else '')"
        )
        lines = [json.loads(line) for line in self.python("trainer", program).splitlines()]
        return [line["step"] for line in lines if "reward_mean" in line]

    def tickets(self) -> Tickets:
        """Where every ticket is that was issued before the call."""
        return Tickets(*map(frozenset, json.loads(self.python("trainer", _COUNT_TICKETS))))

    def wait(self, condition: Callable[[], bool], timeout_s: float = 600) -> None:
        """Returns as soon as it is so."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, self.compose("logs", "--tail", "20")
            time.sleep(1)


@pytest.fixture(scope="session")
def stack(tmp_path_factory):
    try:
        client = docker.from_env()
        client.ping()
    except docker.errors.DockerException:
        pytest.skip("no docker engine")
    if not COMPOSE.exists():
        pytest.skip("no docker-compose: run make test-containers")
    environment = {"BASE_IMAGE": BASE_IMAGE, "RUN_FILES": ".cache/compose-test"}
    if "REDIS_IMAGE" not in os.environ:
        folder = str(ROOT / "tests" / "containers")
        client.images.build(
            path=folder, dockerfile="redis.Dockerfile", tag="headrace-test-redis", buildargs={"BASE_IMAGE": BASE_IMAGE}
        )
        environment["REDIS_IMAGE"] = "headrace-test-redis"
    sets = [f"trainer.steps={STEPS}", "trainer.checkpoint.every_steps=2", "trainer.stop_at_reward=2"]
    subprocess.run(
        [sys.executable, "-m", "tools.compose_run", "configs/guess_number.yaml", ".cache/compose-test"]
        + [word for item in sets for word in ("--set", item)],
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    stack = Stack(client, environment)
    stack.compose("down", "--volumes", "--remove-orphans")
    try:
        stack.compose("up", "--detach", "--wait", timeout_s=900)
        yield stack
    finally:
        stack.compose("down", "--volumes")
