"""How fast the whole loop turns when everybody waits: `python -m benchmarks.loop`.

Trainer, gateway, environment server and Redis are real, started by `headrace run`; generation is a sleep of 50 ms (the
scripted engine) and an environment's step sleeps lognormally (mean 500 ms, sigma 1), four of them an episode. Beside it
runs Tunix's agentic learner on the same sleeps, group and batch sizes. One runs after the other, on an otherwise idle
machine.

The ideal bound is the least of what three parts could do if they never waited for another:

    rollout    C / (turns · (generation + mean latency))     every one of C slots always busy
    trainer    B · G / T_train                               T_train: seconds of a step in which it computes
    admission  (max_staleness + 1) · B · G / (T_group + T_train)   tickets that staleness lets be out at once, each held
               from its issue to the step that learns from it; T_group: mean time of a group, its slowest episode

The first two are limits of the machine and make the bound that is reported; the third is a limit of the staleness that
the user asks for and says why a small one cannot reach it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks import results, tunix_venv
from benchmarks.results import Figure
from headrace import step_log
from headrace.step_log import Step
from tests import processes
from tests.processes import ROOT

BATCH, GROUP, CONCURRENCY = 4, 4, 64
TURNS, LATENCY_S, SIGMA, GENERATION_S = 4, 0.5, 1.0, 0.05
ACTION_TOKENS, VOCABULARY = 16, 512
OBSERVED_WORDS = ("guess", "a", "number", "higher", "found")


@dataclass(frozen=True)
class Loop:
    """One run, over its steady steps."""

    trajectories_per_s: float
    trainer_idle_fraction: float
    train_s: float

    @property
    def bound_per_s(self) -> float:
        """Trajectories a second that rollout and trainer allow."""
        rollout = CONCURRENCY / (TURNS * (GENERATION_S + LATENCY_S))
        return min(rollout, BATCH * GROUP / self.train_s)


def main() -> None:
    """Measures, prints the table, writes results/loop.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--steps", type=int, default=26, help="steps of each of our runs")
    parser.add_argument("--warm-up", type=int, default=7, help="steps at the start that are not measured")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8], help="sizes of the model, one after another")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 3], help="values of max_staleness")
    parser.add_argument("--tunix-steps", type=int, default=14, help="steps of Tunix; 0 leaves it out")
    options = parser.parse_args()

    measured: list[Figure] = []
    for layers in options.layers:
        rival = measure_tunix(options.tunix_steps, layers) if options.tunix_steps else None
        ours = {
            staleness: measure(staleness, options.steps, options.warm_up, layers) for staleness in options.staleness
        }
        rows = [
            row(f"Headrace, staleness {staleness}", loop, admission(staleness, loop))
            for staleness, loop in ours.items()
        ]
        if rival:
            rows.append(row(f"Tunix {tunix_venv.VERSION}, off_policy_steps 1", rival, math.nan))
        name = f"a model of {layers} layers"
        header = (name, "trajectories/s", "bound", "of bound", "admission limit", "trainer idle", "train s/step")
        print(results.table(header, rows), flush=True)
        measured += [figure for item in ours.items() for figure in figures(*item, rival, layers)]
    if options.steps == parser.get_default("steps"):
        print(results.write("loop", measured))


def measure(staleness: int, steps: int, warm_up: int, layers: int) -> Loop:
    """Runs our loop once."""
    print(f"running Headrace at max_staleness {staleness}, {layers} layers", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="headrace-loop-") as folder:
        path = Path(folder)
        engine_port, trainer = processes.free_port(), f"127.0.0.1:{processes.free_port()}"
        run_file = path / "run.yaml"
        run_file.write_text(
            yaml.safe_dump(run_config(path, staleness, steps, layers=layers, engine_port=engine_port, trainer=trainer))
        )
        script = {
            "tokens": "random",
            "choices": list(range(10, VOCABULARY)),
            "length": ACTION_TOKENS,
            "logprob": -math.log(VOCABULARY),
            "delay_s": GENERATION_S,
        }
        engine = [sys.executable, "-m", "tests.scripted_engine", "--listen", f"127.0.0.1:{engine_port}"]
        engine += ["--trainer", trainer, "--options", json.dumps(script)]
        with processes.running(engine, path / "engine.log", ready=lambda: processes.listening(engine_port)):
            launched = subprocess.run(
                [sys.executable, "-m", "headrace", "run", str(run_file)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        if launched.returncode != 0:
            logs = "".join(f"\n== {log.name}\n{log.read_text()[-2000:]}" for log in path.glob("loop/logs/*.log"))
            sys.exit(f"headrace run failed:\n{launched.stdout}{logs}")
        return steady(step_log.read(path / "loop" / step_log.NAME), warm_up)


def steady(steps: Sequence[Step], warm_up: int) -> Loop:
    """What the steps after the first `warm_up` did."""
    measured = steps[warm_up:]
    window_s = measured[-1].time_s - steps[warm_up - 1].time_s
    busy_s = sum((1 - step.idle_fraction) * step.step_s for step in measured)
    return Loop(
        trajectories_per_s=sum(step.trajectories for step in measured) / window_s,
        trainer_idle_fraction=1 - busy_s / window_s,
        train_s=busy_s / len(measured),
    )


def measure_tunix(steps: int, layers: int) -> Loop:
    """Runs Tunix once."""
    python = tunix_venv.ensure(ROOT / ".cache" / "tunix")
    print(f"running Tunix {tunix_venv.VERSION}, {layers} layers", file=sys.stderr)
    command = [str(python), "-m", "benchmarks.tunix_agentic", "--steps", str(steps), "--batch", str(BATCH)]
    command += ["--group", str(GROUP), "--concurrency", str(CONCURRENCY), "--turns", str(TURNS)]
    command += ["--layers", str(layers)]
    command += ["--latency", str(LATENCY_S), "--sigma", str(SIGMA), "--generation", str(GENERATION_S)]
    answer = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    values = json.loads(answer.stdout.splitlines()[-1])
    return Loop(values["trajectories_per_s"], values["trainer_idle_fraction"], values["train_s"])


def run_config(
    folder: Path, staleness: int, steps: int, *, layers: int, engine_port: int, trainer: str
) -> dict[str, object]:
    """The run file: the shapes of benchmarks/tunix_agentic.py."""
    return {
        "run": {"id": "loop", "directory": str(folder)},
        "model": {
            "create": {
                "architecture": "LlamaForCausalLM",
                "hidden_size": 256,
                "intermediate_size": 1024,
                "num_hidden_layers": layers,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "max_position_embeddings": 256,
                "words": [*OBSERVED_WORDS, *(f"t{number}" for number in range(VOCABULARY - 7 - len(OBSERVED_WORDS)))],
            }
        },
        "trainer": {
            "address": trainer,
            "steps": steps,
            "groups_per_step": BATCH,
            "max_staleness": staleness,
            "microbatch_tokens": 1024,
            "max_row_tokens": 128,
            "optimizer": {"learning_rate": 1e-5},
            "checkpoint": {"every_steps": 10 * steps},
        },
        "rollout": {
            "group_size": GROUP,
            "max_concurrent_episodes": CONCURRENCY,
            "max_action_tokens": ACTION_TOKENS,
            "max_episode_tokens": 128,
        },
        "inference": {"addresses": [f"127.0.0.1:{engine_port}"], "context_length": 256},
        "environments": {
            "latency": {
                "class": "benchmarks.latency_environment:Latency",
                "options": {"turns": TURNS, "mean_s": LATENCY_S, "sigma": SIGMA},
                "max_turns": TURNS,
            }
        },
        "telemetry": {"tensorboard": False},
    }


def admission(staleness: int, loop: Loop) -> float:
    """Trajectories a second that the tickets allowed by the staleness bound admit."""
    return (staleness + 1) * BATCH * GROUP / (mean_group_s() + loop.train_s)


def mean_group_s(samples: int = 20_000) -> float:
    """Mean seconds of a group that starts at once: the slowest of its episodes, each a sum of sleeps."""
    generator = random.Random(0)
    mu = math.log(LATENCY_S) - SIGMA * SIGMA / 2

    def episode_s() -> float:
        return sum(GENERATION_S + generator.lognormvariate(mu, SIGMA) for _ in range(TURNS))

    return sum(max(episode_s() for _ in range(GROUP)) for _ in range(samples)) / samples


def row(name: str, loop: Loop, admission_per_s: float) -> list[str]:
    """One line of the table."""
    return [
        name,
        f"{loop.trajectories_per_s:.2f}",
        f"{loop.bound_per_s:.2f}",
        f"{loop.trajectories_per_s / loop.bound_per_s:.2f}",
        "" if math.isnan(admission_per_s) else f"{admission_per_s:.2f}",
        f"{loop.trainer_idle_fraction:.2f}",
        f"{loop.train_s:.2f}",
    ]


def figures(staleness: int, loop: Loop, rival: Loop | None, layers: int) -> list[Figure]:
    """What goes into the file."""
    suffix = f"layers_{layers}_staleness_{staleness}"
    return [
        Figure(
            f"loop_trajectories_per_s_{suffix}",
            loop.trajectories_per_s,
            rival.trajectories_per_s if rival else None,
            loop.bound_per_s,
            "trajectories/s",
        ),
        Figure(
            f"loop_fraction_of_bound_{suffix}",
            loop.trajectories_per_s / loop.bound_per_s,
            rival.trajectories_per_s / rival.bound_per_s if rival else None,
            1.0,
            "1",
        ),
        Figure(
            f"loop_trainer_idle_{suffix}",
            loop.trainer_idle_fraction,
            rival.trainer_idle_fraction if rival else None,
            0.0,
            "1",
        ),
    ]


if __name__ == "__main__":
    main()
