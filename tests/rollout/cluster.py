"""A gateway's surroundings as real processes: Redis, an environment server of guess_number, and a scripted engine."""

import asyncio
import contextlib
import json
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from redis.exceptions import RedisError

from headrace import config, stream
from headrace import trajectory as records
from headrace.v1 import trajectory_pb2 as pb
from tests import processes
from tests.rollout.rig import VOCABULARY_SIZE, settings, task


class Cluster:
    """One run's processes, started as a test needs them."""

    def __init__(
        self,
        folder: Path,
        stack: contextlib.ExitStack,
        *,
        script: dict[str, object],
        versions: Sequence[int] = (0,),
        addresses: Sequence[str] = (),
        **overrides: object,
    ):
        """`versions`: of each engine that is started. `addresses`: of those that there are, too."""
        self.folder, self._stack = folder, stack
        (folder / "redis").mkdir()
        self.redis_url, self.redis = stack.enter_context(processes.redis_server(folder / "redis"))
        engines, environment = [processes.free_port() for _ in versions], processes.free_port()
        environment_metrics = processes.free_port()
        self.config = settings(
            folder,
            redis__url=self.redis_url,
            inference__addresses=[*(f"127.0.0.1:{engine}" for engine in engines), *addresses],
            environments__guess_number__address=f"127.0.0.1:{environment}",
            **overrides,
        )
        self.run_file = folder / "run.yaml"
        self.run_file.write_text(config.dump(self.config))
        self.engines = []
        for number, (port, version) in enumerate(zip(engines, versions, strict=True)):
            arguments = [sys.executable, "-m", "tests.scripted_engine", "--listen", f"127.0.0.1:{port}"]
            arguments += ["--options", json.dumps(script), "--policy-version", str(version)]
            self.engines.append(self._start(f"engine-{number}", arguments, port))
        self.engine = self.engines[0] if self.engines else None
        self.environment = self._start(
            "environment",
            processes.service(
                "envs",
                *("--config", str(self.run_file), "--environment", "guess_number"),
                *("--listen", f"127.0.0.1:{environment}", "--metrics-listen", f"127.0.0.1:{environment_metrics}"),
            ),
            environment,
        )
        self.environment.metrics = f"http://127.0.0.1:{environment_metrics}/metrics"
        self.client = stream.connect(self.redis_url, timeout_s=5)
        self.streams = stream.Streams(
            self.client, self.config.run.id, claim_timeout_s=self.config.rollout.claim_timeout_s
        )

    def gateway(self, name="gateway-0", *options):
        """A running gateway, and its address; `options` are further ones of its command line."""
        port, metrics = processes.free_port(), processes.free_port()
        process = self._start(
            name,
            processes.service(
                "rollout",
                *("--config", str(self.run_file), "--name", name),
                *("--listen", f"127.0.0.1:{port}", "--metrics-listen", f"127.0.0.1:{metrics}"),
                *options,
            ),
            port,
        )
        process.address, process.metrics = f"127.0.0.1:{port}", f"http://127.0.0.1:{metrics}/metrics"
        return process

    def _start(self, name, arguments, port):
        process = processes.Process(arguments, self.folder / f"{name}.log")
        self._stack.callback(process.stop)
        processes.wait_until(lambda: processes.listening(port), timeout_s=30, process=process)
        return process

    async def issue(self, count, *, held=False, first=0):
        """Issues tickets; the engine holds what is sampled for them until `release`, where so asked."""
        await self.streams.open()
        tasks = [task(number, min_policy_version=int(held)) for number in range(first, first + count)]
        await self.streams.issue(tasks, first_sequence=first)

    async def release(self):
        """The engine has the weights that held tickets wait for."""
        await self.set_policy_version(1)

    async def set_policy_version(self, version, *, engine=0):
        """The engine has other weights."""
        async with aiohttp.ClientSession() as session:
            url = f"http://{self.config.inference.addresses[engine]}/policy_version"
            async with session.post(url, json={"policy_version": version}) as response:
                assert response.status == 200

    async def groups(self, count, *, timeout_s=60):
        """All groups once there are `count`; each can be true."""
        entries: list[stream.GroupEntry] = []
        async with asyncio.timeout(timeout_s):
            while len(entries) < count:
                with contextlib.suppress(RedisError):  # it may be starting
                    entries += await self.streams.read_groups(count - len(entries), 0.2)
        groups = [pb.TrajectoryGroup.FromString(entry.payload) for entry in entries]
        for group in groups:
            records.check_group(group, run_id=self.config.run.id, vocabulary_size=VOCABULARY_SIZE)
        return groups


def metric(process, name, *, service="rollout"):
    """Value of headrace_<service>_<name> in a process's metrics; 0 where it has none yet."""
    with urllib.request.urlopen(process.metrics, timeout=5) as response:
        for line in response.read().decode().splitlines():
            if line.startswith(f"headrace_{service}_{name} "):
                return float(line.rpartition(" ")[2])
    return 0.0
