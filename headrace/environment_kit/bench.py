"""How fast a server answers: episodes over and over, so many at once, and how long each response took."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from headrace import rpc
from headrace.environment_kit.check import offers
from headrace.environment_kit.episode import Broken
from headrace.environment_kit.rules import Settings, Subject
from headrace.security import PLAIN, Security
from headrace.v1 import environment_service_pb2_grpc as pb_grpc


@dataclass(frozen=True)
class Measurement:
    """Times in milliseconds, rates a second, over `seconds` seconds."""

    environment: str
    parallel: int
    seconds: float
    episodes: int
    episodes_per_s: float
    steps: int
    steps_per_s: float
    reset_p50_ms: float
    reset_p99_ms: float
    step_p50_ms: float
    step_p99_ms: float
    failures: dict[str, int] = field(default_factory=dict)
    """Episodes that failed, by reason."""


async def bench(
    address: str, settings: Settings, *, environment: str | None, seconds: float, security: Security = PLAIN
) -> Measurement:
    """Plays `settings.parallel` episodes at once for so long, after a second to warm up. Raises StartupError."""
    async with rpc.channel(address, foreign=True, security=security) as channel:
        stub = pb_grpc.EnvironmentServiceStub(channel)  # type: ignore[no-untyped-call]
        info = (await offers(stub, address, environment, timeout_s=settings.timeout_s, security=security))[0]
        subject = Subject(stub, info, settings)
        await _play(subject, min(1.0, seconds))
        return await _play(subject, seconds)


async def _play(subject: Subject, seconds: float) -> Measurement:
    resets: list[float] = []
    steps: list[float] = []
    failures: Counter[str] = Counter()
    done = 0
    begun = time.perf_counter()

    async def player(number: int) -> None:
        nonlocal done
        seed = number
        while time.perf_counter() - begun < seconds:
            seed += subject.settings.parallel
            try:
                asked = time.perf_counter()
                episode, response = await subject.begin(seed=seed, index=seed)
                resets.append(time.perf_counter() - asked)
                turn = 0
                while not (response.terminated or response.truncated) and time.perf_counter() - begun < seconds:
                    asked = time.perf_counter()
                    response = await episode.send(subject.reply(turn))
                    steps.append(time.perf_counter() - asked)
                    turn += 1
                await episode.end()
                subject.opened.clear()  # nothing of an episode that went well is needed again
                done += 1
            except Broken as broken:
                failures[str(broken)] += 1
                await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as tasks:
        for number in range(subject.settings.parallel):
            tasks.create_task(player(number))
    took = time.perf_counter() - begun
    return Measurement(
        environment=subject.info.name,
        parallel=subject.settings.parallel,
        seconds=round(took, 2),
        episodes=done,
        episodes_per_s=round(done / took, 1),
        steps=len(steps),
        steps_per_s=round(len(steps) / took, 1),
        reset_p50_ms=_percentile_ms(resets, 0.5),
        reset_p99_ms=_percentile_ms(resets, 0.99),
        step_p50_ms=_percentile_ms(steps, 0.5),
        step_p99_ms=_percentile_ms(steps, 0.99),
        failures=dict(failures),
    )


def _percentile_ms(seconds: list[float], share: float) -> float:
    """The nearest-rank percentile; 0 of nothing."""
    ordered = sorted(seconds)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else 0.0


def report(measured: Measurement) -> str:
    """The measurement for people."""
    lines = [
        f"{measured.environment}, {measured.parallel} episodes at once for {measured.seconds:g} s",
        f"  episodes {measured.episodes_per_s:>9,.1f} /s",
        f"  steps    {measured.steps_per_s:>9,.1f} /s   p50 {measured.step_p50_ms:.2f} ms   "
        f"p99 {measured.step_p99_ms:.2f} ms",
        f"  resets                  p50 {measured.reset_p50_ms:.2f} ms   p99 {measured.reset_p99_ms:.2f} ms",
    ]
    lines += [f"  failed   {count:>9,} × {reason}" for reason, count in measured.failures.items()]
    return "\n".join(lines)
