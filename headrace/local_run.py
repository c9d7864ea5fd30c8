"""A run on one machine: its config with every address filled in, and the command of each of its processes.

What a config gives an address of is somebody else's and is not started: Redis, engines, environments. The trainer is
always ours; an address given for it is where it listens.
"""

from __future__ import annotations

import contextlib
import fcntl
import random
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace import config as run_config
from headrace import redis_server
from headrace.config import Config
from headrace.errors import StartupError
from headrace.process import Command

_HOST = "127.0.0.1"
_LOWEST_PORT = 10_000
_FEWEST_PORTS = 1_000
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Whoever sends or receives weights allocates chunks of 2 MiB, which glibc by default takes from the kernel and gives
# back one by one: each is paged in anew. Kept, gRPC moved 512 MiB in such chunks at 3,367 MB/s instead of 672, for less
# than a third of the processor time. glibc reads these when a process starts; other C libraries ignore them.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "268435456", "MALLOC_TRIM_THRESHOLD_": "1073741824"}


@dataclass(frozen=True)
class LocalRun:
    """What to start, and the order in which to stop it: each stage ends before the next is asked to."""

    config: Config
    folder: Path
    redis: Command | None
    trainer: Command
    gateways: tuple[Command, ...]
    engines: tuple[Command, ...]
    environments: tuple[Command, ...]
    metrics_addresses: dict[str, str]

    @property
    def commands(self) -> tuple[Command, ...]:
        """All of them."""
        return (*((self.redis,) if self.redis else ()), *self.services)

    @property
    def services(self) -> tuple[Command, ...]:
        """All but Redis."""
        return (*self.environments, self.trainer, *self.engines, *self.gateways)

    @property
    def stages(self) -> tuple[tuple[Command, ...], ...]:
        """Who stops first: the trainer writes its checkpoint, gateways drain, then nobody needs the rest."""
        redis = (self.redis,) if self.redis else ()
        return ((self.trainer,), self.gateways, (*self.engines, *self.environments), redis)


def plan(config: Config) -> LocalRun:
    """Fills in addresses with free ports and writes down every command. Starts nothing, writes nothing.

    Raises:
        StartupError: Redis must be started and there is no program for it, or engines that are none of ours.
    """
    ports = free_ports()
    folder = config.run.path.resolve()
    metrics: dict[str, str] = {}

    def address() -> str:
        return f"{_HOST}:{next(ports)}"

    def service(module: str, name: str, *arguments: str, listen: str, grace_s: float, ends: bool = False) -> Command:
        command = [
            sys.executable,
            "-m",
            f"services.{module}",
            "--config",
            str(folder / "config.yaml"),
            "--listen",
            listen,
        ]
        if module == "inference":
            metrics[name] = listen
        else:
            metrics[name] = address()
            command += ["--metrics-listen", metrics[name]]
        environment = KEEP_FREED_MEMORY if module in ("trainer", "inference") else {}
        return Command(name, (*command, *arguments), folder / "logs" / f"{name}.log", grace_s, ends, environment)

    redis = None
    redis_url = config.redis.url
    if not redis_url:
        port = next(ports)
        redis_url = f"redis://{_HOST}:{port}/0"
        program = redis_server.find()
        arguments = redis_server.arguments(program, port=port, directory=folder / "redis")
        redis = Command("redis", arguments, folder / "logs" / "redis.log", grace_s=10)

    trainer_address = config.trainer.address or address()
    bulk = ("--bulk-listen", f"{trainer_address.rpartition(':')[0]}:{next(ports)}")
    trainer = service("trainer", "trainer", *bulk, listen=trainer_address, grace_s=60, ends=True)

    environments, served = dict(config.environments), []
    for key, environment in config.environments.items():
        if not environment.address and environment.driver == "gateway":
            listen = address()
            environments[key] = environment.model_copy(update={"address": listen})
            served.append(service("envs", f"env-{key}", "--environment", key, listen=listen, grace_s=10))

    engine_addresses, engines = config.inference.addresses, []
    if not engine_addresses and config.inference.dialect == "vllm":
        raise StartupError(
            "inference.addresses: is empty; with inference.dialect vllm, start vLLM servers and their pullers and list"
            " their host:port (docs/vllm.md)"
        )
    if not engine_addresses:
        engine_addresses = [address() for _ in range(config.inference.replicas)]
        for number, listen in enumerate(engine_addresses):
            name = f"engine-{number}"
            grace_s = config.inference.drain_timeout_s + 5
            several = len(engine_addresses) > 1
            peers = ("--weights-listen", address(), "--bulk-listen", address()) if several else ()
            engines.append(service("inference", name, "--name", name, *peers, listen=listen, grace_s=grace_s))

    gateways = []
    for number in range(config.rollout.replicas):
        name = f"gateway-{number}"
        grace_s = config.rollout.drain_timeout_s + 5
        agents = any(environment.driver == "external" for environment in config.environments.values())
        outside = ("--openai-listen", address()) if agents else ()
        gateways.append(service("rollout", name, "--name", name, *outside, listen=address(), grace_s=grace_s))

    resolved = config.model_copy(
        update={
            "redis": config.redis.model_copy(update={"url": redis_url}),
            "trainer": config.trainer.model_copy(update={"address": trainer_address}),
            "inference": config.inference.model_copy(update={"addresses": list(engine_addresses)}),
            "environments": environments,
        }
    )
    return LocalRun(
        config=resolved,
        folder=folder,
        redis=redis,
        trainer=trainer,
        gateways=tuple(gateways),
        engines=tuple(engines),
        environments=tuple(served),
        metrics_addresses=metrics,
    )


@contextlib.contextmanager
def exclusive(run: LocalRun) -> Iterator[None]:
    """Holds the run's folder: two launchers would overwrite each other's config and Redis data.

    Raises:
        StartupError: another launcher holds it.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it when the process dies
        except BlockingIOError as error:
            raise StartupError(
                f"run.id {run.config.run.id}: another `headrace run` works in {run.folder}; stop it or set another id"
            ) from error
        yield


def write(run: LocalRun) -> None:
    """Makes the run's folder with the config that its services read."""
    for folder in ("logs", "redis") if run.redis else ("logs",):
        (run.folder / folder).mkdir(parents=True, exist_ok=True)
    file = run.folder / "config.yaml"
    file.touch(mode=0o600)  # it holds what ${NAME} stood for, a password perhaps
    file.write_text(run_config.dump(run.config))


def free_ports(ephemeral: Path = _EPHEMERAL_PORTS) -> Iterator[int]:
    """Ports that nobody listens on, in random order, below those that the kernel gives to outgoing connections: so a
    service that starts a second time finds its own still free. Where the kernel gives nearly all, any.

    Args:
        ephemeral: file that says which ones those are.
    """
    try:
        highest = int(ephemeral.read_text().split()[0])
    except OSError:  # no Linux
        highest = 32_768
    if highest < _LOWEST_PORT + _FEWEST_PORTS:
        highest = 65_536
    for port in random.sample(range(_LOWEST_PORT, highest), highest - _LOWEST_PORT):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
        yield port
