"""An engine process under test, with a trainer in this process that publishes what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from headrace import config, model_folder
from tests import processes
from tests.inference import reference
from tests.inference.trainer import Trainer

WORDS = [f"w{i}" for i in range(40)]


class Engine:
    """One engine process; `versions` are the weights that were published to it."""

    def __init__(self, settings: config.Config, process: processes.Process, url: str, trainer: Trainer, loop: Any):
        self.settings, self.process, self.url = settings, process, url
        self.followers: list[processes.Process] = []  # its other hosts
        self.model: dict[str, Any] = json.loads((settings.model_path / "config.json").read_text())
        self.versions: dict[int, dict[str, np.ndarray]] = {}
        self._trainer, self._loop = trainer, loop

    @property
    def newest(self) -> int:
        return max(self.versions, default=0)

    def publish(self, version: int, tensors: Mapping[str, np.ndarray] | None = None, *, wait: bool = True) -> None:
        """Publishes random weights, or these, and waits until the engine uses them."""
        self.versions[version] = dict(tensors or reference.random_weights(self.model, seed=version))
        publishing = self._trainer.publish(version, self.versions[version])
        asyncio.run_coroutine_threadsafe(publishing, self._loop).result(10)
        if wait:
            processes.wait_until(
                lambda: self.get("/policy_version")["policy_version"] == version, timeout_s=60, process=self.process
            )

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Returns once it holds; raises when the engine has ended, or after a minute."""
        processes.wait_until(condition, timeout_s=60, process=self.process)

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return json.loads(reply.read())

    def status(self, path: str) -> int:
        """HTTP status of a GET; 0 when nothing answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    async def generate(self, prompts: list[list[int]], new: int, **options: Any) -> list[dict[str, Any]]:
        """Replies to prompts sent at once, in order."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return list(await asyncio.gather(*(self.call(session, prompt, new, **options) for prompt in prompts)))

    async def call(self, session: aiohttp.ClientSession, prompt: list[int], new: int, **options: Any) -> dict[str, Any]:
        """One reply, checked to agree with itself; an error's body with its "status"."""
        names: tuple[str, ...] = ("rid", "extra_key", "min_policy_version")
        keys = {key: options.pop(key) for key in names if key in options}
        sampling: dict[str, Any] = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True, **options}
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **keys}
        async with session.post(self.url + "/generate", json=body) as response:
            reply = json.loads(await response.read())
        if response.status == 200:
            meta, ids = reply["meta_info"], reply["output_ids"]
            assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
            assert meta["completion_tokens"] == len(ids) == sum(length for _, length in meta["policy_versions"])
            assert meta["prompt_tokens"] == len(prompt)
        return {**reply, "status": response.status}

    def errors(self, prompt: list[int], reply: Mapping[str, Any], temperature: float = 1.0) -> np.ndarray:
        """|difference| of each sampled token's logprob to the reference's."""
        meta = reply["meta_info"]
        spans = meta["policy_versions"]
        expected = reference.logprobs(
            self.model,
            self.versions,
            prompt,
            reply["output_ids"],
            spans=spans,
            temperature=temperature,
            recomputed=self.settings.inference.update == "recompute",
        )
        return np.abs(expected - np.array([entry[0] for entry in meta["output_token_logprobs"]]))

    def prompt(self, length: int, seed: int) -> list[int]:
        return np.random.default_rng(seed).integers(4, self.model["vocab_size"], length).tolist()

    async def metrics(self) -> dict[str, float]:
        """The values at /metrics, by name and labels."""
        async with aiohttp.ClientSession() as session, session.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    async def hold(self, body: object) -> tuple[int, dict[str, Any]]:
        """Status and answer of POST /weights."""
        async with aiohttp.ClientSession() as session, session.post(self.url + "/weights", json=body) as reply:
            return reply.status, await reply.json()

    def cpu_s(self) -> float:
        """Processor time that the process has taken."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / 100


@contextlib.contextmanager
def running(
    folder: Path,
    *,
    model: Mapping[str, Any],
    inference: Mapping[str, Any],
    arguments: tuple[str, ...] = (),
    nodes: int = 1,
) -> Iterator[Engine]:
    """An engine, of so many hosts, that is built but holds no weights yet."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="trainer", daemon=True)
    thread.start()
    trainer = asyncio.run_coroutine_threadsafe(Trainer().start(), loop).result(10)
    settings = run_file(folder, trainer.address, model=model, inference=inference)
    listen = f"127.0.0.1:{processes.free_port()}"
    command = processes.service("inference", "--config", str(folder / "run.yaml"), "--listen", listen, *arguments)
    if nodes > 1:
        command += ["--nodes", str(nodes), "--coordinator", f"127.0.0.1:{processes.free_port()}", "--node-rank"]
    process = processes.Process([*command, "0"] if nodes > 1 else command, folder / "engine.log")
    engine = Engine(settings, process, f"http://{listen}", trainer, loop)
    for rank in range(1, nodes):
        engine.followers.append(processes.Process([*command, str(rank)], folder / f"host-{rank}.log"))
    try:
        # /get_load answers once the engine is built.
        processes.wait_until(lambda: engine.status("/get_load") == 200, timeout_s=300, process=process)
        yield engine
    finally:
        for each in (process, *engine.followers):
            each.stop()
        asyncio.run_coroutine_threadsafe(trainer.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def run_file(
    folder: Path, trainer_address: str, *, model: Mapping[str, Any], inference: Mapping[str, Any]
) -> config.Config:
    """Writes run.yaml and the model folder for a model from nothing."""
    context = inference.get("context_length", 256)
    tree = {
        "run": {"id": "test", "directory": str(folder)},
        "model": {"create": {"words": WORDS, "max_position_embeddings": context, **model}},
        "trainer": {
            "address": trainer_address,
            "steps": 1,
            "groups_per_step": 1,
            "max_row_tokens": 64,
            "optimizer": {"learning_rate": 0.1},
        },
        "rollout": {"group_size": 2, "max_action_tokens": 8, "max_episode_tokens": 64},
        "inference": {"compilation_cache": str(processes.ROOT / ".cache" / "jax-tests"), **inference},
        "environments": {"any": {"class": "guess_number"}},
    }
    settings = config.parse(tree)
    (folder / "run.yaml").write_text(config.dump(settings))
    model_folder.ensure(settings)
    return settings
