"""The pipeline model: its parts against closed forms, its laws, and the loop that was really measured."""

import dataclasses
import json
import math
import random

import pytest

from benchmarks import results, scaling
from benchmarks.pipeline_model import inputs, recipe
from benchmarks.pipeline_model.distribution import Distribution
from benchmarks.pipeline_model.engine import Engine, Request
from benchmarks.pipeline_model.plan import Bus, EngineSpeed, Plan, Sample, Weights
from benchmarks.pipeline_model.server import Server
from benchmarks.pipeline_model.simulation import simulate

FREE = Weights(size_bytes=1.0, egress_bytes_per_s=1e9, stream_bytes_per_s=1e9)
# 2 engines, 4 groups of 4 a step, turns of 10 tokens at 10 ms and 0.4 s of environment: an episode takes 1 s.
EVEN = Plan(
    engines=2,
    gateways=2,
    slots=64,
    group_size=4,
    groups_per_step=4,
    max_staleness=1,
    turns=2,
    action_tokens=Sample(10),
    environment_s=Sample(0.4),
    engine=EngineSpeed(base_s=0.01),
    weights=FREE,
    group_train_s=0.1,
)
UNEVEN = dataclasses.replace(EVEN, action_tokens=Sample(10, 0.6), environment_s=Sample(0.4, 1.2))
SLOW_WEIGHTS = Weights(size_bytes=5.0, egress_bytes_per_s=4.0, stream_bytes_per_s=4.0, stage_s=0.2, swap_s=0.1)


def _plans():
    for bound in (0, 1, 3, 8):
        yield dataclasses.replace(UNEVEN, max_staleness=bound)
        yield dataclasses.replace(UNEVEN, max_staleness=bound, weights=SLOW_WEIGHTS)
    yield dataclasses.replace(
        UNEVEN, weights=dataclasses.replace(SLOW_WEIGHTS, fan_out=2, delta_fraction=0.3), engines=9
    )
    yield dataclasses.replace(UNEVEN, max_staleness=4, gateways=3, slots=5)
    yield dataclasses.replace(UNEVEN, max_staleness=4, engine=EngineSpeed(0.01, 0.002, max_running=6, prefill_s=0.01))
    yield dataclasses.replace(UNEVEN, gateway_step_s=0.02, bus=Bus(0.01, 0.001), group_bytes=20)


PLANS = list(_plans())


@pytest.mark.parametrize("plan", PLANS)
def test_every_ticket_has_one_end_and_no_token_is_older_than_the_bound(plan):
    outcome = simulate(plan, steps=60, warm_up=10)
    tickets = outcome.tickets
    assert tickets.trained == 60 * plan.groups_per_step
    assert tickets.issued == tickets.trained + tickets.returned + tickets.outstanding
    assert tickets.outstanding == (plan.max_staleness + 1) * plan.groups_per_step
    assert outcome.max_age <= plan.max_staleness
    assert len(outcome.tokens_by_age) == outcome.max_age + 1
    assert sum(outcome.tokens_by_age) == pytest.approx(50 * 4 * 4 * 2 * plan.action_tokens.mean, rel=0.1)


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_a_run_that_ends_leaves_no_ticket_out(bound):
    tickets = simulate(dataclasses.replace(UNEVEN, max_staleness=bound), steps=30, warm_up=5, ends=True).tickets
    assert tickets.outstanding == 0
    assert tickets.issued == tickets.trained + tickets.returned


def test_a_seed_gives_one_outcome():
    first, again, other = (simulate(UNEVEN, steps=20, warm_up=5, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("plan", PLANS)
def test_littles_law(plan):
    outcome = simulate(plan, steps=400, warm_up=50)
    assert outcome.episodes_ended / outcome.seconds * outcome.episode_s == pytest.approx(
        outcome.episodes_running, rel=0.03
    )


# An episode takes 2 · (10 · 10 ms + 0.4 s) = 1 s; a step is 16 episodes.
@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({"max_staleness": 0}, 16 / (1.0 + 0.4)),  # rollout, then training, in turn
        ({"max_staleness": 8, "slots": 64}, 16 / 0.4),  # the trainer
        ({"max_staleness": 8, "gateways": 1, "slots": 8, "group_train_s": 0.001}, 8 / 1.0),  # the slots
        # Engines of 2 requests: 2 tokens each 10 ms, 20 tokens an episode.
        (
            {"max_staleness": 8, "engine": EngineSpeed(0.01, max_running=2), "group_train_s": 0.001},
            2 * 2 / 0.01 / 20,
        ),
        ({"max_staleness": 8, "gateways": 1, "gateway_step_s": 0.1, "group_train_s": 0.001}, 1 / (2 * 0.1)),
        ({"max_staleness": 8, "bus": Bus(entry_s=0.4), "group_train_s": 0.001}, 4 / (2 * 0.4)),  # a ticket, a group
        ({"max_staleness": 8, "weights": dataclasses.replace(FREE, snapshot_s=1.6)}, 16 / 2.0),  # publication
    ],
)
def test_even_pipelines_have_the_rate_of_their_bottleneck(changes, rate):
    outcome = simulate(dataclasses.replace(EVEN, **changes), steps=200, warm_up=50)
    assert outcome.trajectories_per_s == pytest.approx(rate, rel=0.03)


def test_the_saturated_resource_is_named():
    def bottleneck(**changes):
        return simulate(dataclasses.replace(UNEVEN, max_staleness=8, **changes), steps=100, warm_up=30).bottleneck

    assert bottleneck(group_train_s=1.0) == "trainer"
    assert bottleneck(engine=EngineSpeed(0.01, max_running=1)) == "engines"
    assert bottleneck(gateway_step_s=0.2) == "gateways"
    assert bottleneck(bus=Bus(entry_s=0.5)) == "Redis"
    assert simulate(UNEVEN, steps=100, warm_up=30).bottleneck == "staleness"
    slow = dataclasses.replace(SLOW_WEIGHTS, egress_bytes_per_s=0.5, stream_bytes_per_s=0.5)
    assert simulate(dataclasses.replace(UNEVEN, weights=slow), steps=100, warm_up=30).bottleneck == "trainer's network"


def test_a_server_waits_as_an_m_d_1_queue():
    """Mean wait ρ · s / (2 · (1 - ρ)): Pollaczek-Khinchine, https://en.wikipedia.org/wiki/M/D/1_queue."""
    draw, server, now_s, waited_s = random.Random(0), Server(), 0.0, 0.0
    load, work_s, count = 0.7, 1.0, 100_000
    for _ in range(count):
        now_s += draw.expovariate(load / work_s)
        waited_s += server.serve(now_s, work_s) - work_s - now_s
    assert waited_s / count == pytest.approx(load * work_s / (2 * (1 - load)), rel=0.05)
    assert server.busy_s == pytest.approx(count * work_s)


def test_an_engine_that_shares_evenly_answers_as_a_processor_sharing_queue():
    """Mean time x / (1 - ρ), whatever the sizes: https://en.wikipedia.org/wiki/Processor_sharing."""
    draw, engine, count, load = random.Random(1), Engine(EngineSpeed(base_s=0.0, request_s=1.0)), 30_000, 0.6
    arrivals, now_s = [], 0.0
    for _ in range(count):
        now_s += draw.expovariate(load)
        arrivals.append(now_s)
    total_s, ended = 0.0, 0
    while ended < count:
        if arrivals and arrivals[0] <= engine.next_end_s():
            now_s = arrivals.pop(0)
            engine.submit(now_s, Request(now_s, tokens=1.0))
            continue
        now_s = engine.next_end_s()
        for request in engine.finish(now_s):
            total_s += now_s - request.owner
            ended += 1
    assert total_s / count == pytest.approx(1 / (1 - load), rel=0.06)


def test_an_engine_decodes_its_batch_together():
    engine = Engine(EngineSpeed(base_s=1.0, request_s=0.5, max_running=2))
    first, second, third = Request("a", 4.0), Request("b", 8.0), Request("c", 1.0)
    engine.submit(0.0, first)
    assert engine.next_end_s() == 6.0  # 4 steps of 1.5 s
    engine.submit(3.0, second)  # 2 tokens are done; steps take 2 s now
    engine.submit(3.0, third)  # there is no room
    assert engine.next_end_s() == 7.0
    assert engine.finish(7.0) == [first]
    assert engine.next_end_s() == 9.0
    assert engine.finish(9.0) == [third]
    assert engine.next_end_s() == 9.0 + 5 * 1.5
    assert engine.finish(16.5) == [second]
    assert engine.decoded == pytest.approx(13)
    assert engine.next_end_s() == math.inf


def test_a_swap_divides_the_tokens_of_running_requests():
    engine = Engine(EngineSpeed(base_s=1.0, prefill_s=2.0))
    engine.swap(0.0, 1, 0.0)
    request = Request("a", 10.0)
    engine.submit(0.0, request)
    engine.swap(5.0, 2, 1.0)  # after 2 s of prefill and 3 tokens
    engine.swap(8.0, 5, 0.0)  # after 1 s of pause and 2 more
    assert engine.next_end_s() == 13.0
    assert engine.finish(13.0) == [request]
    assert engine.tokens_by_version(request) == [(1, 3.0), (2, 2.0), (5, 5.0)]
    later = Request("b", 3.0)
    engine.submit(20.0, later)
    assert engine.finish(25.0) == [later]
    assert engine.tokens_by_version(later) == [(5, 3.0)]


def pulled(weights, engines, versions=(1,)):
    """When each engine had each version that it took, and the distribution."""
    distribution, times, due = Distribution(weights, engines), {}, list(versions)
    now_s = 0.0
    for version in due:
        distribution.announce(now_s, version)
        while (next_s := distribution.next_s()) < math.inf:
            now_s = next_s
            for engine, arrived in distribution.arrived(now_s):
                times[engine, arrived] = now_s
                distribution.installed(now_s, engine)
    return times, distribution


def test_direct_pulls_share_the_trainers_network():
    weights = Weights(size_bytes=10.0, egress_bytes_per_s=5.0, stream_bytes_per_s=5.0)
    times, distribution = pulled(weights, 4)
    assert [times[engine, 1] for engine in range(4)] == pytest.approx([8.0] * 4)
    assert distribution.trainer_bytes == 40.0
    assert distribution.trainer_busy_s == pytest.approx(8.0)


def test_one_stream_is_no_faster_than_itself():
    times, _ = pulled(Weights(size_bytes=10.0, egress_bytes_per_s=100.0, stream_bytes_per_s=5.0), 4)
    assert times[3, 1] == pytest.approx(2.0)


@pytest.mark.parametrize("engines", [1, 2, 3, 8, 80])
def test_a_fan_out_costs_the_trainer_one_copy_and_a_tensor_for_each_level_of_the_tree(engines):
    weights = Weights(10.0, egress_bytes_per_s=5.0, stream_bytes_per_s=5.0, fan_out=2, piece_fraction=0.1)
    times, distribution = pulled(weights, engines)
    assert len(times) == engines
    assert distribution.trainer_bytes == 10.0
    assert distribution.trainer_busy_s == pytest.approx(2.0)
    # From the trainer in 2 s. An engine sends to two at half the pace; a tensor of a tenth then takes 0.4 s a level.
    for engine in range(engines):
        level = int(math.log2(engine + 1))
        assert times[engine, 1] == pytest.approx(4.0 + 0.4 * (level - 1) if level else 2.0)


def test_engines_that_hold_different_versions_get_their_deltas_in_trees_of_their_own():
    weights = Weights(10.0, 5.0, 5.0, delta_fraction=0.1, fan_out=2, piece_fraction=0.1)
    distribution = Distribution(weights, 4)
    distribution.announce(0.0, 1)
    arrived = distribution.arrived(4.0)
    assert [engine for engine, _ in arrived] == [0, 1, 2]
    for engine, _ in arrived:
        distribution.installed(4.0, engine)
    distribution.announce(5.0, 2)
    distribution.arrived(100.0)
    distribution.installed(100.0, 3)  # it had version 1 late, and asks when the others have version 2
    assert distribution.trainer_bytes == pytest.approx(10.0 + 1.0)
    assert distribution.next_s() == pytest.approx(100.4)  # from a peer, at half the pace


def test_a_delta_is_a_fraction_once_a_version_is_held():
    weights = Weights(size_bytes=10.0, egress_bytes_per_s=5.0, stream_bytes_per_s=5.0, delta_fraction=0.1)
    times, distribution = pulled(weights, 1, versions=(1, 2, 4))
    assert [times[0, 1], times[0, 2] - times[0, 1], times[0, 4] - times[0, 2]] == pytest.approx([2.0, 0.2, 0.4])
    assert distribution.trainer_bytes == pytest.approx(13.0)


def test_an_engine_passes_over_versions_that_come_while_it_pulls():
    weights = Weights(size_bytes=10.0, egress_bytes_per_s=5.0, stream_bytes_per_s=5.0)
    distribution = Distribution(weights, 1)
    for now_s, version in ((0.0, 1), (0.5, 2), (1.0, 3)):
        distribution.announce(now_s, version)
    assert distribution.next_s() == pytest.approx(2.0)
    assert distribution.arrived(2.0) == [(0, 1)]
    distribution.installed(2.5, 0)
    assert distribution.arrived(distribution.next_s()) == [(0, 3)]


def test_the_model_is_near_the_loop_that_was_measured():
    measured = json.loads((results.FOLDER / "loop.json").read_text())
    for bound in range(4):
        rate = measured[f"loop_trajectories_per_s_layers_4_staleness_{bound}"]["ours"]
        idle = measured[f"loop_trainer_idle_layers_4_staleness_{bound}"]["ours"]
        plan = scaling.loop_plan(bound, train_s=(1 - idle) * 16 / rate, gateway_step_s=482e-6)
        modelled = [simulate(plan, steps=26, warm_up=7, seed=seed, ends=True).trajectories_per_s for seed in range(8)]
        assert sum(modelled) / len(modelled) == pytest.approx(rate, rel=0.2)


def test_inputs_are_read_from_our_results_with_their_sources():
    given = inputs.read()
    measured = json.loads((results.FOLDER / "gateway.json").read_text())["gateway_cpu_per_step"]["ours"]
    assert given.gateway_step_s.value == measured * 1e-6
    assert all(item.source and item.value > 0 for _, item in given.rows())


def test_a_recipe_has_places_for_every_ticket():
    given = inputs.read()
    plan = recipe.plan(given, recipe.TOOLS, engines=1024, trainer_chips=512)
    assert plan.max_episodes == 98_304
    assert plan.gateways * plan.slots >= plan.max_episodes


def test_a_gateway_without_room_for_a_group_is_refused():
    with pytest.raises(ValueError, match="slots"):
        dataclasses.replace(EVEN, slots=3)
