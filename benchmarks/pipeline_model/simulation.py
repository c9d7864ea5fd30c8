"""The pipeline as a discrete-event simulation.

    trainer issues tickets ─▶ gateways with free slots claim ─▶ episodes: engine, environment, engine, … ─▶ the group's
    last episode ends ─▶ Redis ─▶ the trainer judges its age, learns ─▶ after a step: a version, and tickets again

The rules are those of the code: at most (max_staleness + 1) · groups_per_step tickets without an end; an engine holds
a request until its weights are as new as the ticket says; an episode stays with its engine, the least occupied when it
began; a swap goes through running requests; a group whose oldest token is too old is returned, and its ticket replaced
at once.

`simulate` runs one plan and returns what happened after the warm-up. The same plan and seed give the same outcome.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.pipeline_model.distribution import Distribution
from benchmarks.pipeline_model.engine import Engine, Request
from benchmarks.pipeline_model.outcome import Outcome, Tickets
from benchmarks.pipeline_model.plan import Plan, Sample
from benchmarks.pipeline_model.server import Server

# What an event is.
_ENGINE, _STEPPED, _REQUEST, _GROUP, _LEARNED, _PUBLISHED, _PULLS, _STAGED = range(8)


def simulate(plan: Plan, *, steps: int, warm_up: int, seed: int = 0, ends: bool = False) -> Outcome:
    """Runs the pipeline for so many steps and measures it after the first `warm_up`.

    Args:
        plan: the pipeline.
        steps: of the trainer.
        warm_up: steps at the start that are not measured.
        seed: of all draws.
        ends: whether the run is over after the last step: then the last steps' tickets are no more than they need, as
            in a real run. Otherwise it is cut out of a longer one.
    """
    if not 0 <= warm_up < steps:
        raise ValueError("warm_up must be 0 or more, and below steps")
    return _Simulation(plan, seed, last_step=steps if ends else None).run(steps, warm_up)


@dataclass(slots=True)
class _Group:
    gateway: int
    min_version: int
    remaining: int
    oldest: int = 1_000_000_000
    tokens: dict[int, float] = field(default_factory=dict)  # by version


@dataclass(slots=True)
class _Episode:
    group: _Group
    engine: int
    start_s: float
    turns_left: int


@dataclass
class _Totals:
    """Counted since the start; the outcome is a difference of two."""

    seconds: float = 0.0
    trained: int = 0
    returned: int = 0
    episodes: int = 0
    episode_s: float = 0.0
    running_s: float = 0.0  # integral of the episodes that run
    trainer_s: float = 0.0
    decoded: float = 0.0
    stalled_s: float = 0.0
    redis_s: float = 0.0
    redis_bytes: float = 0.0
    redis_entries: int = 0
    egress_s: float = 0.0
    egress_bytes: float = 0.0
    lag: float = 0.0
    gateway_s: tuple[float, ...] = ()
    ages: Counter[int] = field(default_factory=Counter)


class _Simulation:
    def __init__(self, plan: Plan, seed: int, last_step: int | None):
        self._plan, self._last_step = plan, last_step
        self._events: list[tuple[float, int, int, object]] = []
        self._numbers = itertools.count()
        draw = random.Random(seed)
        self._tokens, self._latencies = _draws(plan.action_tokens, draw), _draws(plan.environment_s, draw)
        self._engines = [Engine(plan.engine) for _ in range(plan.engines)]
        self._due_s = [math.inf] * plan.engines
        self._held: list[list[Request]] = [[] for _ in range(plan.engines)]
        self._loads = [(0, number) for number in range(plan.engines)]
        self._distribution = Distribution(plan.weights, plan.engines)
        self._pulls_due_s = math.inf
        self._gateways = [Server() for _ in range(plan.gateways)]
        self._free = [plan.slots] * plan.gateways
        self._claiming = deque(range(plan.gateways))
        self._bus = Server()
        self._tickets: deque[int] = deque()  # the version that each asks for
        self._ready: deque[_Group] = deque()
        self._issued, self._step, self._taken, self._busy = 0, 0, 0, False
        self._version = 0
        self._running = 0
        self._now_s = 0.0
        self._totals = _Totals()

    def run(self, steps: int, warm_up: int) -> Outcome:
        self._publish()
        before = self._snapshot()
        measured_from = 0
        while self._step < steps:
            if self._step >= warm_up > measured_from:
                before, measured_from = self._snapshot(), warm_up
            if not self._events:
                raise RuntimeError("nothing will ever happen again: have the gateways places for a group?")
            time_s, _, kind, subject = heapq.heappop(self._events)
            self._totals.running_s += self._running * (time_s - self._now_s)
            self._now_s = time_s
            self._handle(kind, subject)
        return self._outcome(before, self._snapshot(), steps - measured_from)

    def _handle(self, kind: int, subject: object) -> None:
        if kind == _ENGINE:
            self._engine_due(subject)  # type: ignore[arg-type]
        elif kind == _STEPPED:
            self._stepped(subject)  # type: ignore[arg-type]
        elif kind == _REQUEST:
            self._submit(subject)  # type: ignore[arg-type]
        elif kind == _GROUP:
            self._ready.append(subject)  # type: ignore[arg-type]
            self._learn()
        elif kind == _LEARNED:
            self._learned(subject)  # type: ignore[arg-type]
        elif kind == _PUBLISHED:
            self._step, self._taken, self._busy = self._step + 1, 0, False
            self._publish()
            self._learn()
        elif kind == _PULLS:
            self._pulls_due_s = math.inf
            for engine, version in self._distribution.arrived(self._now_s):
                self._at(self._now_s + self._plan.weights.stage_s, _STAGED, (engine, version))
            self._watch_pulls()
        else:
            self._install(*subject)  # type: ignore[misc]

    # The trainer.

    def _publish(self) -> None:
        self._version += 1
        self._distribution.announce(self._now_s, self._version)
        self._watch_pulls()
        self._top_up()

    def _top_up(self) -> None:
        steps = self._plan.max_staleness + 1
        if self._last_step is not None:
            steps = min(steps, self._last_step - self._step)
        outstanding = self._issued - self._totals.trained - self._totals.returned
        missing = max(0, steps * self._plan.groups_per_step - outstanding)
        self._issued += missing
        self._totals.redis_s += missing * self._plan.bus.entry_s
        self._totals.redis_entries += missing
        if missing and self._plan.bus.entry_s:
            self._bus.serve(self._now_s, missing * self._plan.bus.entry_s)
        self._tickets.extend([self._version] * missing)
        self._assign()

    def _learn(self) -> None:
        """Takes the next group, if the trainer is free."""
        while not self._busy and self._ready:
            group = self._ready.popleft()
            if self._version - group.oldest > self._plan.max_staleness:
                self._totals.returned += 1
                self._top_up()
                continue
            self._busy = True
            self._totals.trainer_s += self._plan.group_train_s
            self._at(self._now_s + self._plan.group_train_s, _LEARNED, group)

    def _learned(self, group: _Group) -> None:
        self._taken += 1
        for version, tokens in group.tokens.items():
            self._totals.ages[self._version - version] += round(tokens)
        if self._taken < self._plan.groups_per_step:
            self._busy = False
            self._learn()
            return
        self._totals.trained += self._taken
        rest_s = self._plan.update_s + self._plan.weights.snapshot_s
        self._totals.trainer_s += rest_s
        self._at(self._now_s + rest_s, _PUBLISHED, None)

    # Gateways.

    def _assign(self) -> None:
        """Claims tickets for gateways that have room."""
        size = self._plan.group_size
        while self._tickets and self._claiming:
            gateway = self._claiming.popleft()
            group = _Group(gateway, self._tickets.popleft(), size)
            self._free[gateway] -= size
            if self._free[gateway] >= size:
                self._claiming.append(gateway)
            self._running += size
            for _ in range(size):
                self._next_turn(_Episode(group, self._least_occupied(), self._now_s, self._plan.turns))

    def _next_turn(self, episode: _Episode) -> None:
        sent_s = self._gateways[episode.group.gateway].serve(self._now_s, self._plan.gateway_step_s)
        self._at(sent_s, _REQUEST, Request(episode, next(self._tokens)))

    def _stepped(self, episode: _Episode) -> None:
        """The environment has answered."""
        episode.turns_left -= 1
        if episode.turns_left:
            self._next_turn(episode)
            return
        self._running -= 1
        self._totals.episodes += 1
        self._totals.episode_s += self._now_s - episode.start_s
        engine = self._engines[episode.engine]
        engine.attached -= 1
        heapq.heappush(self._loads, (engine.attached, episode.engine))
        group, gateway = episode.group, episode.group.gateway
        self._free[gateway] += 1
        group.remaining -= 1
        if not group.remaining:
            self._to_bus(group)
        if self._free[gateway] == self._plan.group_size:
            self._claiming.append(gateway)
            self._assign()

    def _least_occupied(self) -> int:
        """An engine for an episode that begins. An entry of the heap that is no longer true is dropped."""
        while True:
            load, number = heapq.heappop(self._loads)
            if load == self._engines[number].attached:
                self._engines[number].attached += 1
                heapq.heappush(self._loads, (load + 1, number))
                return number

    def _to_bus(self, group: _Group) -> None:
        work_s = self._plan.bus.entry_s + self._plan.group_bytes * self._plan.bus.byte_s
        self._totals.redis_s += work_s
        self._totals.redis_entries += 1
        self._totals.redis_bytes += 2 * self._plan.group_bytes
        self._at(self._bus.serve(self._now_s, work_s), _GROUP, group)

    # Engines.

    def _submit(self, request: Request) -> None:
        number = request.owner.engine
        if self._engines[number].version < request.owner.group.min_version:
            self._held[number].append(request)
        else:
            self._engines[number].submit(self._now_s, request)
            self._watch(number)

    def _engine_due(self, number: int) -> None:
        if self._due_s[number] != self._now_s:
            return  # overtaken by a later look
        self._due_s[number] = math.inf
        engine = self._engines[number]
        for request in engine.finish(self._now_s):
            episode: _Episode = request.owner
            group = episode.group
            for version, tokens in engine.tokens_by_version(request):
                group.oldest = min(group.oldest, version)
                group.tokens[version] = group.tokens.get(version, 0.0) + tokens
                self._totals.lag += (self._version - version) * tokens
            self._at(self._now_s + next(self._latencies), _STEPPED, episode)
        self._watch(number)

    def _watch(self, number: int) -> None:
        """Looks at an engine again when its next request may end. A look that proves too early is repeated."""
        end_s = max(self._engines[number].next_end_s(), self._now_s)
        if end_s < self._due_s[number]:
            self._due_s[number] = end_s
            self._at(end_s, _ENGINE, number)

    def _watch_pulls(self) -> None:
        end_s = max(self._distribution.next_s(), self._now_s)
        if end_s < self._pulls_due_s:
            self._pulls_due_s = end_s
            self._at(end_s, _PULLS, None)

    def _install(self, number: int, version: int) -> None:
        self._engines[number].swap(self._now_s, version, self._plan.weights.swap_s)
        self._distribution.installed(self._now_s, number)
        self._watch_pulls()
        held, self._held[number] = self._held[number], []
        for request in held:
            self._submit(request)

    def _at(self, time_s: float, kind: int, subject: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), kind, subject))

    # What happened.

    def _snapshot(self) -> _Totals:
        totals = self._totals
        return _Totals(
            **{
                **{name: getattr(totals, name) for name in _Totals.__dataclass_fields__},
                "seconds": self._now_s,
                "decoded": sum(engine.decoded for engine in self._engines),
                "stalled_s": sum(engine.stalled_s for engine in self._engines),
                "egress_s": self._distribution.trainer_busy_s,
                "egress_bytes": self._distribution.trainer_bytes,
                "gateway_s": tuple(gateway.busy_s for gateway in self._gateways),
                "ages": totals.ages.copy(),
            }
        )

    def _outcome(self, before: _Totals, after: _Totals, steps: int) -> Outcome:
        plan, seconds = self._plan, after.seconds - before.seconds
        trained, returned = after.trained - before.trained, after.returned - before.returned
        episodes, decoded = after.episodes - before.episodes, after.decoded - before.decoded
        ages = after.ages - before.ages
        decoding = decoded / seconds / plan.engines / plan.engine.tokens_per_s
        issued, outstanding = self._issued, self._issued - after.trained - after.returned
        return Outcome(
            steps=steps,
            seconds=seconds,
            trajectories_per_s=trained * plan.group_size / seconds,
            returned_fraction=returned / max(trained + returned, 1),
            episodes_running=(after.running_s - before.running_s) / seconds,
            episode_s=(after.episode_s - before.episode_s) / max(episodes, 1),
            episodes_ended=episodes,
            step_s=seconds / steps,
            tokens_by_age=tuple(ages[age] for age in range(max(ages, default=0) + 1)),
            max_age=max(ages, default=0),
            engine_busy=decoding + (after.stalled_s - before.stalled_s) / seconds / plan.engines,
            trainer_busy=(after.trainer_s - before.trainer_s) / seconds,
            egress_busy=(after.egress_s - before.egress_s) / seconds,
            redis_busy=(after.redis_s - before.redis_s) / seconds,
            gateway_busy=max(b - a for a, b in zip(before.gateway_s, after.gateway_s, strict=True)) / seconds,
            redis_bytes_per_s=(after.redis_bytes - before.redis_bytes) / seconds,
            redis_entries_per_s=(after.redis_entries - before.redis_entries) / seconds,
            egress_bytes_per_s=(after.egress_bytes - before.egress_bytes) / seconds,
            lag=(after.lag - before.lag) / max(decoded, 1.0),
            tickets=Tickets(issued, after.trained, after.returned, outstanding),
        )


def _draws(sample: Sample, draw: random.Random) -> Iterator[float]:
    """Independent draws, for ever."""
    if sample.sigma == 0:
        return itertools.repeat(sample.mean)
    mu = math.log(sample.mean) - sample.sigma**2 / 2
    return (math.exp(mu + sample.sigma * draw.gauss(0.0, 1.0)) for _ in itertools.repeat(None))
