"""Drives Tunix's episode loop alone: the rival of benchmarks/environments.py, run by Tunix's own interpreter.

RolloutOrchestrator and TrajectoryCollectEngine, unchanged, on a model that answers at once and an environment that
sleeps. Prints one JSON object for each case: steps, wall seconds and processor seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.tunix_agentic import VOCABULARY, ChatParser, Tokenizer


async def run(
    *, concurrency: int, latency_s: float, turns: int, episodes: int, group: int, action_tokens: int
) -> tuple[float, float]:
    """Runs so many episodes; wall and processor seconds."""
    import numpy as np
    from tunix.generate import tokenizer_adapter
    from tunix.rl.agentic import utils
    from tunix.rl.agentic.agents.model_agent import ModelAgent
    from tunix.rl.agentic.environments.base_environment import BaseTaskEnv, EnvStepResult
    from tunix.rl.agentic.pipeline.rollout_orchestrator import RolloutOrchestrator
    from tunix.rl.rollout import base_rollout

    class Waiting(BaseTaskEnv):
        def __init__(self, task: Any = None, **options: Any):
            options.pop("max_steps", None)
            super().__init__(task, max_steps=turns, **options)

        def _initial_observation(self) -> dict[str, Any]:
            return dict(self.task)

        def _step_impl(self, action: Any) -> Any:
            if latency_s:
                time.sleep(latency_s)
            return EnvStepResult(observation="t7", reward=0.5, done=False, info={})

    tokens = np.arange(10, 10 + action_tokens, dtype=np.int32)
    text = Tokenizer().decode(tokens)

    def model_call(_: Any, env: Any = None, **__: Any) -> Any:
        if env is not None:
            env.task["policy_version"] = 0
        return base_rollout.RolloutOutput(
            text=[text],
            logits=None,
            tokens=[tokens],
            left_padded_prompt_tokens=np.zeros((1, 64), np.int32),
            logprobs=[[-math.log(VOCABULARY)] * action_tokens],
        )

    def pairs() -> Iterator[tuple[Any, Any]]:
        for number in range(episodes):
            ids = {"group_id": number // group, "pair_index": number % group}
            yield ModelAgent("t6"), Waiting({"prompts": "t7 t8 t9"}, **ids)

    # Its environments block: each running episode needs a thread, as in its learner.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=concurrency + 1))
    orchestrator = RolloutOrchestrator(
        rollout_sync_lock=utils.RolloutSyncLock(),
        max_concurrency=concurrency,
        engine_kwargs={
            "model_call": model_call,
            "timeout": 600,
            "max_response_length": 100_000,
            "tokenizer": tokenizer_adapter.TokenizerAdapter(Tokenizer()),
            "chat_parser": ChatParser(),
        },
    )
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    producing = asyncio.create_task(
        orchestrator.run_producers_from_stream(
            pairs(),
            group_size=group,
            group_key_fn=lambda _index, env, _trajectory: env.extra_kwargs["group_id"],
            collect_mode="Token",
        )
    )
    await asyncio.sleep(0)
    ended = 0
    async for batch in orchestrator.yield_batches(batch_size=group):
        ended += len(batch)
    await producing
    if ended != episodes:
        raise SystemExit(f"{ended} of {episodes} episodes ended")
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def main() -> None:
    """Parses the command line, runs each case, prints the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--cases", type=json.loads, required=True, help="JSON: a list of `run`'s arguments")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    from absl import logging

    logging.set_verbosity(logging.ERROR)
    asyncio.run(run(concurrency=8, latency_s=0, turns=2, episodes=8, group=8, action_tokens=4))  # warms up
    for case in options.cases:
        wall_s, cpu_s = asyncio.run(run(**case))
        print(json.dumps({"steps": case["episodes"] * case["turns"], "wall_s": wall_s, "cpu_s": cpu_s}), flush=True)
    os._exit(0)  # Tunix may leave threads behind


if __name__ == "__main__":
    main()
