"""A whole run as real processes, one handle each, for tests that kill them: `headrace run` without its supervision.

with LoopRun(folder, config_path, changes) as run:
    run.start()                      # Redis and every service
    run.wait_for_step(3)
    run.processes["engine-0"].kill()
    run.processes["engine-0"].start()
    run.wait()                       # until the trainer's exit code 0
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from headrace import config
from tests import processes
from tests.processes import Process

ROOT = processes.ROOT
CACHE = ROOT / ".cache" / "test-compilations"


class LoopRun:
    """One run in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        config_path: str = "configs/guess_number.yaml",
        changes: dict[str, Any] | None = None,
        *,
        engines: int = 1,
        gateways: int = 1,
    ):
        self._stack = ExitStack()
        self._folder = folder
        self._port = processes.free_port()
        self.redis_url = f"redis://127.0.0.1:{self._port}/0"
        base = config.load(ROOT / config_path)
        self._listen = {"trainer": _address()}
        self._listen |= {f"engine-{number}": _address() for number in range(engines)}
        self._listen |= {f"gateway-{number}": _address() for number in range(gateways)}
        self._listen |= {f"environment-{name}": _address() for name in base.environments}
        overrides: dict[str, Any] = {
            "run.id": "loop",
            "run.directory": str(folder / "runs"),
            "redis.url": self.redis_url,
            "trainer.address": self._listen["trainer"],
            "inference.addresses": [self._listen[f"engine-{number}"] for number in range(engines)],
            "inference.compilation_cache": str(CACHE),
            "telemetry.tensorboard": False,
            **{f"environments.{name}.address": self._listen[f"environment-{name}"] for name in base.environments},
            **(changes or {}),
        }
        self.config = config.load(ROOT / config_path, overrides=overrides)
        self._config_file = folder / "run.yaml"
        self._config_file.write_text(config.dump(self.config))
        self.processes: dict[str, Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.terminate() if process.running else None
        for process in self.processes.values():
            process.stop()
        self._stack.close()

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.config.run.path

    @property
    def listen(self) -> dict[str, str]:
        """Every service's address, by name."""
        return self._listen

    @property
    def names(self) -> list[str]:
        """Every service's name."""
        return list(self._listen)

    def start_redis(self) -> Process:
        """Starts Redis and waits until it listens."""
        _, process = self._stack.enter_context(processes.redis_server(self._folder, port=self._port))
        return process

    def start_service(self, name: str) -> Process:
        """Starts one service, without waiting."""
        kind, _, rest = name.partition("-")
        arguments = ["--config", str(self._config_file), "--listen", self._listen[name]]
        if kind == "trainer":
            command = processes.service("trainer", *arguments, "--metrics-listen", "127.0.0.1:0")
        elif kind == "engine":
            command = processes.service("inference", *arguments, "--name", name)
        elif kind == "gateway":
            command = processes.service("rollout", *arguments, "--metrics-listen", "127.0.0.1:0", "--name", name)
        else:
            command = processes.service("envs", *arguments, "--environment", rest, "--metrics-listen", "127.0.0.1:0")
        environment = {"JAX_COMPILATION_CACHE_DIR": str(CACHE)} if kind == "trainer" else None
        self.processes[name] = Process(command, self._folder / f"{name}.log", environment=environment)
        return self.processes[name]

    def start(self, order: list[str] | None = None) -> None:
        """Starts Redis and every service."""
        self.start_redis()
        for name in order or self.names:
            self.start_service(name)

    def wait_for_step(self, step: int, *, timeout_s: float = 240) -> None:
        """Returns when the trainer has done that many steps."""
        trainer = self.processes["trainer"]
        processes.wait_until(
            lambda: bool(self.metrics()) and self.metrics()[-1]["step"] >= step, timeout_s=timeout_s, process=trainer
        )

    def wait(self, *, timeout_s: float = 300) -> None:
        """Returns when the trainer has ended well."""
        trainer = self.processes["trainer"]
        code = trainer.wait(timeout_s)
        assert code == 0, f"the trainer ended with {code}; its log ends:\n{trainer.output[-3000:]}"

    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl."""
        return _lines(self.path / "metrics.jsonl")

    def consumed(self) -> list[dict[str, Any]]:
        """Lines of consumed.jsonl."""
        return _lines(self.path / "consumed.jsonl")


def _address() -> str:
    return f"127.0.0.1:{processes.free_port()}"


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
