"""Checks a server rule by rule: what it broke, and the requests that show it."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import grpc

from headrace import rpc
from headrace import security as securities
from headrace.environment_kit import load, rules
from headrace.environment_kit.episode import Broken
from headrace.environment_kit.rules import Settings, Subject, Unchecked
from headrace.errors import StartupError
from headrace.security import PLAIN, Security
from headrace.v1 import environment_service_pb2 as pb
from headrace.v1 import environment_service_pb2_grpc as pb_grpc

RULES = (
    rules.described,
    rules.first_response,
    rules.one_answer,
    rules.determinism,
    rules.malformed_action,
    rules.reset_twice,
    rules.unknown_task,
    rules.reward,
    rules.metric_names,
    rules.demonstration,
    rules.after_the_end,
    load.capacity,
    load.cancel,
    load.parallel,
    rules.long_step,
)
NAMES = tuple(rule.__name__ for rule in RULES)


class Result(StrEnum):
    """What came of a rule."""

    KEPT = "kept"
    BROKEN = "broken"
    UNCHECKED = "unchecked"


@dataclass(frozen=True)
class Finding:
    """One rule of one environment."""

    environment: str
    rule: str
    says: str
    result: Result
    reason: str = ""
    reproduction: Sequence[Sequence[str]] = field(default=())
    """For each episode that shows it, its requests (>) and what came back (<)."""
    seconds: float = 0.0


async def check(
    address: str,
    settings: Settings,
    *,
    environment: str | None = None,
    only: Collection[str] = NAMES,
    security: Security = PLAIN,
) -> AsyncIterator[Finding]:
    """Checks every environment of the server, or the one that is named, and yields what it finds, rule by rule.

    Raises StartupError: the server cannot be reached, or has no such environment.
    """
    async with rpc.channel(address, foreign=True, security=security) as channel:
        stub = pb_grpc.EnvironmentServiceStub(channel)  # type: ignore[no-untyped-call]
        for info in await offers(stub, address, environment, timeout_s=settings.timeout_s, security=security):
            subject = Subject(stub, info, settings)
            for rule in RULES:
                if rule.__name__ in only:
                    yield await _find(rule, subject)


async def offers(
    stub: Any, address: str, environment: str | None, *, timeout_s: float, security: Security = PLAIN
) -> list[pb.EnvironmentInfo]:
    """What the server offers, or the one that is named. Raises StartupError."""
    try:
        request = pb.ListEnvironmentsRequest()
        infos = (await stub.ListEnvironments(request, timeout=timeout_s, wait_for_ready=True)).environments
    except grpc.aio.AioRpcError as error:
        raise StartupError(await _unanswered(error, address, security)) from error
    names = [info.name for info in infos]
    if environment is not None and environment not in names:
        raise StartupError(f"{address} offers no environment {environment!r}, but {', '.join(names) or 'none'}")
    if not names:
        raise StartupError(f"{address} offers no environment: its ListEnvironments is empty")
    return [info for info in infos if environment in (None, info.name)]


async def _unanswered(error: grpc.aio.AioRpcError, address: str, security: Security) -> str:
    if error.code() == grpc.StatusCode.UNAUTHENTICATED:
        return f"{address} refuses us ({error.details()}): give its token's --token-file"
    problem = await securities.diagnose(address, security)
    if problem:
        return f"{problem} (the kit's flags are --tls, --tls-authority, --tls-certificate and --tls-key)"
    what = "nothing answers" if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED else error.details()
    return f"{address}: {what}: does an environment server listen there?"


async def _find(rule: Any, subject: Subject) -> Finding:
    started = time.perf_counter()
    result, reason = Result.KEPT, ""
    logs: list[list[str]] = []
    try:
        await rule(subject)
    except Broken as broken:
        result, reason = Result.BROKEN, str(broken)
        logs = [list(episode.log) for episode in broken.episodes]
    except Unchecked as unchecked:
        result, reason = Result.UNCHECKED, str(unchecked)
    finally:
        # A broken rule leaves streams open, whose places the next rule needs.
        for episode in subject.opened:
            episode.cancel()
        subject.opened.clear()
    return Finding(
        environment=subject.info.name,
        rule=rule.__name__,
        says=(inspect.getdoc(rule) or "").partition("\n")[0],
        result=result,
        reason=reason,
        reproduction=logs,
        seconds=round(time.perf_counter() - started, 3),
    )


def report(finding: Finding) -> str:
    """The finding for people: a line, and the reproduction of what is broken."""
    mark = {Result.KEPT: "kept     ", Result.BROKEN: "BROKEN   ", Result.UNCHECKED: "unchecked"}[finding.result]
    lines = [f"{mark} {finding.rule:<17} {finding.says}"]
    if finding.reason:
        lines.append(f"          {finding.reason}")
    for number, log in enumerate(finding.reproduction):
        if number:
            lines.append("          and")
        lines += [f"            {line}" for line in log]
    return "\n".join(lines)
