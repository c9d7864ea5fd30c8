"""Drives Tunix's agentic GRPO learner on sleeps: the rival of benchmarks/loop.py, run by Tunix's own interpreter.

Generation is a sleep and so is the environment; the training step is real, on a Llama of 256 units,
with actor and rollout on two virtual CPU devices so that weights are really synchronised. Tunix itself is unchanged:
only its `generate` is replaced and its calls are timed. Prints one JSON object; exits with 3 when nothing moves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

VOCABULARY = 512
ACTION_TOKENS = 16
OBSERVATION_WORDS = 1
PROMPT_WORDS = 3
MAX_PROMPT_TOKENS = 128
MAX_RESPONSE_TOKENS = 128
HANG_EXIT_CODE = 3

_SPECIAL = {"<pad>": 0, "<s>": 1, "</s>": 2, "System:": 3, "User:": 4, "Assistant:": 5}


@dataclass(frozen=True)
class Result:
    """Over the steady part of the run."""

    trajectories_per_s: float
    trainer_idle_fraction: float
    train_s: float  # one step's training
    drain_wait_s: float  # one step's wait for running episodes before weights are synchronised
    steps: int
    window_s: float


class Tokenizer:
    """One token a word: "t17" is 17."""

    def bos_id(self) -> int:
        return _SPECIAL["<s>"]

    def eos_id(self) -> int:
        return _SPECIAL["</s>"]

    def pad_id(self) -> int:
        return _SPECIAL["<pad>"]

    def encode(self, text: str, **_: Any) -> list[int]:
        return [_SPECIAL[word] if word in _SPECIAL else int(word[1:]) for word in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(f"t{token}" for token in ids)


class ChatParser:
    """Roles as words."""

    assistant_token = "Assistant: "

    def parse(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False, **_: Any) -> str:
        text = ""
        for message in messages:
            content = message["content"]
            text += f" {message['role'].capitalize()}: {content if isinstance(content, str) else content[0]}"
        return f"{text} {self.assistant_token}" if add_generation_prompt else text


def environment_class(turns: int, latency_s: float, sigma: float) -> type:
    """An environment that sleeps lognormally in each step, mean `latency_s`, and gives a random reward."""
    from tunix.rl.agentic.environments.base_environment import BaseTaskEnv, EnvStepResult

    class SleepingEnvironment(BaseTaskEnv):
        def __init__(self, task: Any = None, **options: Any):
            options.pop("max_steps", None)
            super().__init__(task, max_steps=turns, **options)
            seed = (options.get("group_id") or 0) * 1000 + (options.get("pair_index") or 0)
            self._random = random.Random(seed)

        def _initial_observation(self) -> dict[str, Any]:
            return dict(self.task)

        def _step_impl(self, action: Any) -> Any:
            time.sleep(self._random.lognormvariate(math.log(latency_s) - sigma * sigma / 2, sigma))
            words = " ".join(f"t{self._random.randrange(6, VOCABULARY)}" for _ in range(OBSERVATION_WORDS))
            return EnvStepResult(observation=words, reward=self._random.random(), done=False, info={})

    return SleepingEnvironment


def run(options: argparse.Namespace) -> Result:
    """Trains `options.steps` steps and measures from the end of the second."""
    import grain.python as grain
    import jax
    import numpy as np
    import optax
    from absl import logging
    from flax import nnx
    from tunix.models.llama3 import model as llama
    from tunix.rl import rl_cluster
    from tunix.rl.agentic import agentic_grpo_learner
    from tunix.rl.agentic.agents.model_agent import ModelAgent
    from tunix.rl.rollout import base_rollout

    logging.set_verbosity(logging.ERROR)

    class Prompts(grain.RandomAccessDataSource):
        def __len__(self) -> int:
            return options.batch * (options.steps + 3)

        def __getitem__(self, index: int) -> str:
            return " ".join(f"t{6 + (index * 7 + word * 13) % 500}" for word in range(PROMPT_WORDS))

    def mesh(device: Any) -> Any:
        return jax.sharding.Mesh(np.array([[device]]), ("fsdp", "tp"))

    actor_mesh, rollout_mesh = map(mesh, jax.devices())
    with actor_mesh:
        model = llama.Llama3(
            llama.ModelConfig(
                num_layers=options.layers,
                vocab_size=VOCABULARY,
                embed_dim=256,
                hidden_dim=1024,
                num_heads=4,
                head_dim=64,
                num_kv_heads=2,
                rope_theta=10000,
                norm_eps=1e-5,
                weight_tying=True,
            ),
            rngs=nnx.Rngs(0),
        )
    cluster = rl_cluster.RLCluster(
        actor=model,
        reference=None,
        tokenizer=Tokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={
                rl_cluster.Role.ACTOR: actor_mesh,
                rl_cluster.Role.REFERENCE: actor_mesh,
                rl_cluster.Role.ROLLOUT: rollout_mesh,
            },
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-5),
                eval_every_n_steps=1000,
                max_steps=options.steps,
                mini_batch_size=options.batch,
                train_micro_batch_size=options.batch,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_prompt_length=MAX_PROMPT_TOKENS,
                max_tokens_to_generate=MAX_RESPONSE_TOKENS,
                return_logprobs=True,
                kv_cache_size=1024,
                temperature=1.0,
            ),
        ),
    )
    learner = agentic_grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=None,
        algo_config=agentic_grpo_learner.GRPOConfig(
            num_generations=options.group,
            num_iterations=1,
            beta=0.0,
            max_response_length=MAX_RESPONSE_TOKENS,
            max_concurrency=options.concurrency,
            off_policy_steps=options.off_policy_steps,
        ),
        chat_parser=ChatParser(),
        agent_class=ModelAgent,
        env_class=environment_class(options.turns, options.latency, options.sigma),
    )

    trained: list[tuple[float, float]] = []  # end and length of each training
    synced: list[float] = []  # ends of weight synchronisations
    drained: list[tuple[float, float]] = []

    def timed(call: Any, record: Any, ready: Any = lambda: None) -> Any:
        def wrapper(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments, **named)
            ready()
            record(time.perf_counter(), time.perf_counter() - began)
            return result

        return wrapper

    def generate(*_: Any, **__: Any) -> Any:
        time.sleep(options.generation)
        tokens = np.arange(10, 10 + ACTION_TOKENS, dtype=np.int32)
        return base_rollout.RolloutOutput(
            text=[Tokenizer().decode(tokens)],
            logits=None,
            tokens=[tokens],
            left_padded_prompt_tokens=np.zeros((1, MAX_PROMPT_TOKENS), np.int32) + 7,
            logprobs=[[-math.log(VOCABULARY)] * ACTION_TOKENS],
        )

    def weights_ready() -> None:
        jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model, nnx.Param)))

    cluster.generate = generate
    cluster.update_actor = timed(cluster.update_actor, lambda end, s: trained.append((end, s)), weights_ready)
    cluster.sync_weights = timed(cluster.sync_weights, lambda end, s: synced.append(end))
    lock = learner._rollout_sync_lock
    lock.acquire_weight_sync = timed(lock.acquire_weight_sync, lambda end, s: drained.append((end, s)))
    threading.Thread(target=_watch, args=(synced, options.hang_timeout), daemon=True).start()

    prompts = grain.MapDataset.source(Prompts()).batch(options.batch).map(lambda texts: {"prompts": texts})
    learner.train(prompts)

    start, end = synced[1], synced[-1]
    window_s, steps = end - start, len([at for at in synced if start < at <= end])
    busy_s = sum(seconds for at, seconds in trained if start < at <= end)
    waits = [seconds for at, seconds in drained if start < at <= end]
    return Result(
        trajectories_per_s=steps * options.batch * options.group / window_s,
        trainer_idle_fraction=1 - busy_s / window_s,
        train_s=busy_s / steps,
        drain_wait_s=sum(waits) / max(len(waits), 1),
        steps=steps,
        window_s=window_s,
    )


def _watch(synced: list[float], timeout_s: float) -> None:
    """Ends the process when no step ends for so long: Tunix can deadlock."""
    seen, since = 0, time.monotonic()
    while time.monotonic() - since < timeout_s:
        time.sleep(1)
        if len(synced) != seen:
            seen, since = len(synced), time.monotonic()
    os._exit(HANG_EXIT_CODE)


def main() -> None:
    """Parses the command line, trains, prints the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4, help="groups of a step")
    parser.add_argument("--group", type=int, default=4, help="trajectories of a group")
    parser.add_argument("--concurrency", type=int, default=64, help="episodes at once")
    parser.add_argument("--off-policy-steps", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--latency", type=float, default=0.5, help="mean seconds of an environment's step")
    parser.add_argument("--sigma", type=float, default=1.0, help="of its lognormal distribution")
    parser.add_argument("--generation", type=float, default=0.05, help="seconds of a generation call")
    parser.add_argument("--hang-timeout", type=float, default=120.0, help="seconds without a step that end the run")
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(json.dumps(asdict(run(options))), flush=True)
    os._exit(0)  # Tunix leaves threads behind


if __name__ == "__main__":
    main()
