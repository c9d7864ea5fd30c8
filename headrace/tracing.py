"""Traces: one for each trajectory, through every service that had a part in it. Off unless a collector is configured.

    episode ─┬─ session ─┬─ reset, step              what the gateway waited for
             │           ├─ Interact ── reset, step  in the environment server
             │           └─ engine call ── generate  the latter in the engine
             ├─ publish
             └─ train                                in the trainer; linked with the train step's own trace, which
                                                     links back to each of its trajectories

The ids of an episode's span follow from run, trajectory and gateway, so the trainer names them without a field in the
record. Between services a context travels as W3C's traceparent (https://www.w3.org/TR/trace-context/), in gRPC
metadata and HTTP headers. Spans are exported by a thread; a collector that is away costs spans, nothing else.

Off, nothing of OpenTelemetry is imported, and every function here returns at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headrace.errors import StartupError

if TYPE_CHECKING:
    from headrace.otlp import Recorder

HEADER = "traceparent"
_STOP_S = 3.0

type Attribute = str | int | float | list[int] | list[str]


class Ids(NamedTuple):
    """What names a span everywhere."""

    trace_id: int  # 128 bits
    span_id: int  # 64 bits


class Span(Protocol):
    """A span that is open."""

    @property
    def recorded(self) -> bool:
        """Whether it is worth working out attributes for."""

    def set(self, **attributes: Attribute) -> None:
        """Adds attributes; each is exported as headrace.NAME."""


class _Nothing:
    recorded = False

    def set(self, **attributes: Attribute) -> None:
        pass


_NOTHING = contextlib.nullcontext(_Nothing())
_recorder: Recorder | None = None


def configure(service: str, *, instance: str, run_id: str, endpoint: str, sample_ratio: float) -> None:
    """Turns tracing on for this process if `endpoint` names a collector: http(s)://HOST:PORT, OTLP over HTTP.

    Args:
        service: trainer, gateway, engine or environment.
        instance: the process's name, unique in the run; of a gateway the one that its groups carry.
        run_id: the run.
        endpoint: where spans go; empty: nowhere.
        sample_ratio: share of the trajectories that are traced, the same ones in every service.

    Raises:
        StartupError: OpenTelemetry is not installed.
    """
    global _recorder  # noqa: PLW0603 - one for the process, as of logging
    if not endpoint:
        return
    try:
        from headrace.otlp import Recorder
    except ImportError as error:
        raise StartupError(
            f"telemetry.traces.endpoint is set, but OpenTelemetry is not installed ({error}): install headrace[traces],"
            " or leave the endpoint empty"
        ) from error
    _recorder = Recorder(service, instance=instance, run_id=run_id, endpoint=endpoint, sample_ratio=sample_ratio)


def stop() -> None:
    """Exports what is left, for a few seconds at the most."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        # Not on this thread: a collector that does not answer would hold up the process's end.
        thread = threading.Thread(target=recorder.close, daemon=True)
        thread.start()
        thread.join(_STOP_S)


def recorder() -> Recorder | None:
    """What records spans, None where tracing is off."""
    return _recorder


def trajectory(trajectory_id: str, **attributes: Attribute) -> AbstractContextManager[Span]:
    """The body is the episode of this trajectory, run by this gateway: the root of its trace."""
    if _recorder is None:
        return _NOTHING
    return _recorder.trajectory(trajectory_id, attributes)


def span(name: str, **attributes: Attribute) -> AbstractContextManager[Span]:
    """The body is a part of the span that is open; of none, where none is."""
    if _recorder is None:
        return _NOTHING
    return _recorder.child(name, attributes)


def received(name: str, traceparent: str | None, **attributes: Attribute) -> AbstractContextManager[Span]:
    """The body answers a call of another service, as part of the span that the caller names."""
    if _recorder is None or traceparent is None:
        return _NOTHING
    return _recorder.received(name, traceparent, attributes)


def of_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """The traceparent of a gRPC call."""
    if _recorder is None:
        return None
    return next((str(value) for key, value in metadata or () if key == HEADER), None)


def note(**attributes: Attribute) -> None:
    """Adds attributes to the span that is open."""
    if _recorder is not None:
        _recorder.note(attributes)


def headers() -> dict[str, str]:
    """What an outgoing HTTP request adds to its headers."""
    if _recorder is None:
        return {}
    traceparent = _recorder.traceparent()
    return {HEADER: traceparent} if traceparent else {}


def metadata() -> tuple[tuple[str, str], ...]:
    """What an outgoing gRPC call adds to its metadata."""
    return tuple(headers().items())


def trajectory_ids(run_id: str, trajectory_id: str, gateway: str) -> Ids:
    """The ids of the span of a trajectory's episode. Two gateways that run the same ticket share the trace alone."""
    trace = _digest(run_id, trajectory_id, size=16)
    return Ids(trace, _digest(run_id, trajectory_id, gateway, size=8))


def is_sampled(trace_id: int, ratio: float) -> bool:
    """Whether a share `ratio` of all traces holds this one: every service answers alike."""
    return trace_id & (2**64 - 1) < ratio * 2**64


def format_traceparent(ids: Ids, *, sampled: bool) -> str:
    """W3C's header."""
    return f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{sampled:02x}"


def parse_traceparent(value: str) -> tuple[Ids, bool] | None:
    """(ids, whether it is sampled) of W3C's header, None where it is none."""
    match = re.fullmatch(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", value)
    if match is None:
        return None
    ids = Ids(int(match.group(1), 16), int(match.group(2), 16))
    return (ids, bool(int(match.group(3), 16) & 1)) if all(ids) else None


def _digest(*words: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(words).encode(), digest_size=size).digest()) or 1
