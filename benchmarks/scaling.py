"""What limits a large pipeline: `python -m benchmarks.scaling` (about four minutes on one core).

A seeded discrete-event simulation (benchmarks/pipeline_model) of the whole loop, from 1 to 1,024 engines and to 98,304
episodes at once. Its inputs are measured by our other benchmarks where they can be; each is printed with its source. It
is first held against the loop that `benchmarks.loop` measured. docs/scale.md tells what comes out, and what the model
leaves out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import results, scaling_plot
from benchmarks.loop import ACTION_TOKENS, BATCH, CONCURRENCY, GENERATION_S, GROUP, LATENCY_S, SIGMA, TURNS
from benchmarks.pipeline_model import inputs, recipe
from benchmarks.pipeline_model.inputs import Inputs
from benchmarks.pipeline_model.outcome import Outcome
from benchmarks.pipeline_model.plan import EngineSpeed, Plan, Sample, Weights
from benchmarks.pipeline_model.recipe import PUBLICATIONS, Workload
from benchmarks.pipeline_model.simulation import simulate
from benchmarks.results import Figure

ENGINES = (1, 4, 16, 64, 256, 1024)
ENGINES_PER_TRAINER = 16  # for each 8 chips of a trainer that grows with them
STALENESS = range(9)
STALENESS_ENGINES, STALENESS_GROUPS = 16, 64
_PLOT = Path(__file__).resolve().parent.parent / "docs" / "scale.png"


@dataclass(frozen=True)
class Row:
    """One simulated pipeline."""

    name: str  # in the results' file
    label: str
    plan: Plan
    outcome: Outcome
    limit_per_s: float  # trajectories that engines and trainer could make if they never waited


def main() -> None:
    """Simulates, prints the tables, writes results/scaling.json and docs/scale.png."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", type=int, nargs="+", default=list(ENGINES), help="numbers of engines")
    options = parser.parse_args()
    given = inputs.read()
    print(results.table(["input", "value", "source"], [_input_row(*item) for item in given.rows()]), flush=True)
    loop = list(against_the_loop(given))
    print("\n" + results.table(LOOP_HEADER, loop), flush=True)
    by_engines = show(scale(given, options.engines, options.seed))
    fixed = show(fixed_trainer(given, [count for count in options.engines if count <= 256], options.seed))
    gateways = show(few_gateways(given, options.seed))
    by_staleness = show(staleness(given, options.seed))
    rows = [*by_engines, *fixed, *gateways, *by_staleness]
    if options.engines == list(ENGINES) and options.seed == parser.get_default("seed"):
        print(results.write("scaling", [figure for row in rows for figure in figures(row)]))
        print(scaling_plot.draw(ENGINES, STALENESS, _PLOT))


def scale(given: Inputs, engines: Sequence[int], seed: int) -> Iterator[Row]:
    """More and more engines, and a trainer that grows with them; weights published in four ways."""
    for count in engines:
        for publication in PUBLICATIONS:
            chips = trainer_chips(count)
            plan = recipe.plan(given, recipe.TOOLS, engines=count, trainer_chips=chips, publication=publication)
            yield run(f"engines_{count}_{publication.slug}", f"{count}, {publication.name}", plan, seed=seed)


def fixed_trainer(given: Inputs, engines: Sequence[int], seed: int) -> Iterator[Row]:
    """More and more engines for a trainer of 8 chips."""
    for count in engines:
        plan = recipe.plan(given, recipe.TOOLS, engines=count, trainer_chips=8)
        yield run(f"fixed_trainer_engines_{count}", f"{count}, trainer of 8 chips", plan, seed=seed)


def few_gateways(given: Inputs, seed: int) -> Iterator[Row]:
    """All episodes of 256 engines on few gateways: what their processors allow."""
    plan = recipe.plan(given, recipe.TOOLS, engines=256, trainer_chips=trainer_chips(256))
    for count in (1, 2):
        few = dataclasses.replace(plan, gateways=count, slots=plan.max_episodes)
        yield run(f"gateways_{count}", f"256, on {count} gateway{'s' * (count > 1)}", few, seed=seed)


def staleness(given: Inputs, seed: int) -> Iterator[Row]:
    """The same engines, trainer and batch under each bound, with ordinary and with very uneven tools."""
    for name, workload in (("tools", recipe.TOOLS), ("stragglers", recipe.STRAGGLERS)):
        for bound in STALENESS:
            plan = recipe.plan(
                given,
                workload,
                engines=STALENESS_ENGINES,
                trainer_chips=trainer_chips(STALENESS_ENGINES),
                max_staleness=bound,
                groups_per_step=STALENESS_GROUPS,
            )
            yield run(f"staleness_{bound}_{name}", f"{name}, max_staleness {bound}", plan, seed=seed, workload=workload)


def run(name: str, label: str, plan: Plan, *, seed: int, workload: Workload = recipe.TOOLS) -> Row:
    """Simulates enough steps for a steady figure: more where a step is few episodes."""
    steps = max(8, min(80, 100_000 // plan.episodes_per_step))
    warm_up = max(3, min(2 * (plan.max_staleness + 1), steps // 3))
    engines_per_s = plan.engines * plan.engine.tokens_per_s / workload.actions
    limit = min(engines_per_s, plan.episodes_per_step / plan.train_s)
    return Row(name, label, plan, simulate(plan, steps=steps, warm_up=warm_up, seed=seed), limit)


def against_the_loop(given: Inputs, runs: int = 40) -> Iterator[list[str]]:
    """The model with the sleeps of benchmarks.loop beside what that measured, over as many runs of as many steps."""
    measured = json.loads((results.FOLDER / "loop.json").read_text())
    for layers, bound in ((4, 0), (4, 1), (4, 2), (4, 3), (8, 3)):
        suffix = f"layers_{layers}_staleness_{bound}"
        rate = measured[f"loop_trajectories_per_s_{suffix}"]["ours"]
        idle = measured[f"loop_trainer_idle_{suffix}"]["ours"]
        plan = loop_plan(bound, train_s=(1 - idle) * BATCH * GROUP / rate, gateway_step_s=given.gateway_step_s.value)
        outcomes = [simulate(plan, steps=26, warm_up=7, seed=seed, ends=True) for seed in range(runs)]
        rates = [outcome.trajectories_per_s for outcome in outcomes]
        mean, spread = statistics.mean(rates), statistics.stdev(rates)
        modelled_idle = 1 - statistics.mean(outcome.trainer_busy for outcome in outcomes)
        yield [
            f"{layers} layers, max_staleness {bound}",
            f"{rate:.2f}",
            f"{mean:.2f} ± {spread:.2f}",
            f"{mean / rate - 1:+.0%}",
            f"{idle:.2f}",
            f"{modelled_idle:.2f}",
        ]


LOOP_HEADER = ("loop benchmark", "trajectories/s", "model (± of one run)", "difference", "trainer idle", "model")


def loop_plan(max_staleness: int, *, train_s: float, gateway_step_s: float) -> Plan:
    """The rig of benchmarks.loop: engines and environments that sleep, weights that cost nothing to move."""
    return Plan(
        engines=1,
        gateways=1,
        slots=CONCURRENCY,
        group_size=GROUP,
        groups_per_step=BATCH,
        max_staleness=max_staleness,
        turns=TURNS,
        action_tokens=Sample(ACTION_TOKENS),
        environment_s=Sample(LATENCY_S, SIGMA),
        engine=EngineSpeed(base_s=GENERATION_S / ACTION_TOKENS),
        weights=Weights(size_bytes=1.0, egress_bytes_per_s=1e9, stream_bytes_per_s=1e9),
        group_train_s=train_s / BATCH,
        gateway_step_s=gateway_step_s,
    )


def trainer_chips(engines: int) -> float:
    """Of a trainer that grows with its engines, 8 at least."""
    return 8 * max(1.0, engines / ENGINES_PER_TRAINER)


HEADER = (
    *(
        "engines",
        "in flight",
        "trajectories/s",
        "of limit",
        "bottleneck",
        "engines busy",
        "trainer",
        "network",
        "Redis",
    ),
    *("gateway", "Redis MB/s", "egress MB/s", "step s", "returned", "mean age", "max"),
)


def show(rows: Iterator[Row]) -> list[Row]:
    """Prints the table when all rows are there."""
    done = list(rows)
    print("\n" + results.table(HEADER, [cells(row) for row in done]), flush=True)
    return done


def cells(row: Row) -> list[str]:
    """One line of the table."""
    outcome = row.outcome
    shares = (outcome.engine_busy, outcome.trainer_busy, outcome.egress_busy, outcome.redis_busy, outcome.gateway_busy)
    return [
        row.label,
        f"{row.plan.max_episodes}",
        f"{outcome.trajectories_per_s:.1f}",
        f"{outcome.trajectories_per_s / row.limit_per_s:.2f}",
        outcome.bottleneck,
        *(f"{share:.2f}" for share in shares),
        f"{outcome.redis_bytes_per_s / 1e6:.1f}",
        f"{outcome.egress_bytes_per_s / 1e6:.0f}",
        f"{outcome.step_s:.1f}",
        f"{outcome.returned_fraction:.2f}",
        f"{outcome.mean_age:.2f}",
        f"{outcome.max_age}",
    ]


def figures(row: Row) -> list[Figure]:
    """What goes into the file."""
    outcome = row.outcome
    plain = {
        "redis_bytes_per_s": "bytes/s",
        "egress_bytes_per_s": "bytes/s",
        "engine_busy": "1",
        "trainer_busy": "1",
        "egress_busy": "1",
        "redis_busy": "1",
        "gateway_busy": "1",
        "returned_fraction": "1",
        "mean_age": "versions",
    }
    rate = outcome.trajectories_per_s
    total = sum(outcome.tokens_by_age)
    return [
        Figure(f"scaling_trajectories_per_s_{row.name}", rate, None, row.limit_per_s, "trajectories/s"),
        *(
            Figure(f"scaling_{name}_{row.name}", getattr(outcome, name), None, None, unit)
            for name, unit in plain.items()
        ),
        *(
            Figure(f"scaling_tokens_of_age_{age}_{row.name}", tokens / total, None, None, "1")
            for age, tokens in enumerate(outcome.tokens_by_age)
        ),
    ]


def _input_row(name: str, item: inputs.Input) -> list[str]:
    return [name, f"{item.value:.4g} {item.unit}", item.source]


if __name__ == "__main__":
    main()
