"""Records spans with OpenTelemetry's SDK and exports them over OTLP/HTTP. Loaded only where tracing is on.

A thread exports; its queue is bounded, and what does not fit, or what the collector does not take, is dropped. Whether
the collector answers is told in one line when that changes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, TraceFlags

from headrace import tracing
from headrace.tracing import Attribute, Ids

log = logging.getLogger(__name__)

_EXPORT_TIMEOUT_S = 5.0
_QUEUE_SPANS = 16_384
_MOST_LINKS = 16_384  # trajectories of one train step

_wanted: ContextVar[Ids | None] = ContextVar("wanted_ids", default=None)


class Recorder:
    """The process's tracer."""

    def __init__(self, service: str, *, instance: str, run_id: str, endpoint: str, sample_ratio: float):
        self.run_id = run_id
        self._instance, self._ratio = instance, sample_ratio
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # _Exporter tells, and once
        resource = Resource.create(
            {"service.name": f"headrace-{service}", "service.instance.id": instance, "headrace.run_id": run_id}
        )
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON),
            resource=resource,
            id_generator=_IdGenerator(),
            span_limits=SpanLimits(max_links=_MOST_LINKS),
            shutdown_on_exit=False,
        )
        exporter = _Exporter(endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_QUEUE_SPANS))
        self._tracer = self._provider.get_tracer("headrace")

    def close(self) -> None:
        """Exports what is left; blocks for as long as the collector does."""
        self._provider.shutdown()

    @contextlib.contextmanager
    def trajectory(self, trajectory_id: str, attributes: Mapping[str, Attribute]) -> Iterator[_Open]:
        ids = tracing.trajectory_ids(self.run_id, trajectory_id, self._instance)
        if not tracing.is_sampled(ids.trace_id, self._ratio):
            # Says to every service on the way that this trajectory is not traced.
            with trace.use_span(NonRecordingSpan(_context(ids, sampled=False))):
                yield _Open(trace.INVALID_SPAN)
            return
        token = _wanted.set(ids)
        try:
            span = self._tracer.start_span(
                "episode",
                context=trace.set_span_in_context(trace.INVALID_SPAN),
                attributes=_prefixed({"trajectory_id": trajectory_id, **attributes}),
            )
        finally:
            _wanted.reset(token)
        with trace.use_span(span, end_on_exit=True, record_exception=False):
            yield _Open(span)

    @contextlib.contextmanager
    def child(self, name: str, attributes: Mapping[str, Attribute]) -> Iterator[_Open]:
        if not trace.get_current_span().is_recording():
            yield _Open(trace.INVALID_SPAN)
            return
        span = self._tracer.start_span(name, attributes=_prefixed(attributes))
        with trace.use_span(span, end_on_exit=True, record_exception=False):
            yield _Open(span)

    @contextlib.contextmanager
    def received(self, name: str, traceparent: str, attributes: Mapping[str, Attribute]) -> Iterator[_Open]:
        parsed = tracing.parse_traceparent(traceparent)
        if parsed is None or not parsed[1]:
            yield _Open(trace.INVALID_SPAN)
            return
        parent = trace.set_span_in_context(NonRecordingSpan(_context(parsed[0], sampled=True)))
        span = self._tracer.start_span(name, parent, kind=SpanKind.SERVER, attributes=_prefixed(attributes))
        with trace.use_span(span, end_on_exit=True, record_exception=False):
            yield _Open(span)

    def note(self, attributes: Mapping[str, Attribute]) -> None:
        _Open(trace.get_current_span()).set(**attributes)

    def traceparent(self) -> str:
        """That of the open span; empty where none is."""
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return ""
        ids = Ids(context.trace_id, context.span_id)
        return tracing.format_traceparent(ids, sampled=context.trace_flags.sampled)

    def completed(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        parent: Ids | None = None,
        links: Sequence[Ids] = (),
        **attributes: Attribute,
    ) -> Ids:
        """Records a span that has ended, times in nanoseconds since the epoch. Returns its ids.

        Args:
            parent: what it is part of; None: of nothing.
            links: spans that it has to do with.
        """
        around: trace.Span = trace.INVALID_SPAN
        if parent is not None:
            around = NonRecordingSpan(_context(parent, sampled=True))
        span = self._tracer.start_span(
            name,
            trace.set_span_in_context(around),
            attributes=_prefixed(attributes),
            links=[Link(_context(ids, sampled=True)) for ids in links],
            start_time=start_ns,
        )
        span.end(end_ns)
        context = span.get_span_context()
        return Ids(context.trace_id, context.span_id)

    def samples(self, ids: Ids) -> bool:
        """Whether this trajectory's trace is recorded."""
        return tracing.is_sampled(ids.trace_id, self._ratio)


class _Open:
    def __init__(self, span: trace.Span):
        self._span = span

    @property
    def recorded(self) -> bool:
        return self._span.is_recording()

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_prefixed(attributes))


class _IdGenerator(RandomIdGenerator):
    """Random ids, but for those that are wanted."""

    def generate_trace_id(self) -> int:
        wanted = _wanted.get()
        return wanted.trace_id if wanted else super().generate_trace_id()

    def generate_span_id(self) -> int:
        wanted = _wanted.get()
        return wanted.span_id if wanted else super().generate_span_id()


class _Exporter(SpanExporter):
    """OTLP over HTTP; tells in one line when the collector stops or begins to answer."""

    def __init__(self, endpoint: str):
        self._endpoint = endpoint
        self._answers = True
        url = endpoint.rstrip("/")
        url = url if url.endswith("/v1/traces") else f"{url}/v1/traces"
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_S)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        answers = result is SpanExportResult.SUCCESS
        if self._answers and not answers:
            log.warning("no trace collector answers at %s: spans are dropped until one does", self._endpoint)
        elif answers and not self._answers:
            log.info("the trace collector at %s answers again", self._endpoint)
        self._answers = answers
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _context(ids: Ids, *, sampled: bool) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return SpanContext(ids.trace_id, ids.span_id, is_remote=True, trace_flags=flags)


def _prefixed(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {f"headrace.{name}": value for name, value in attributes.items()}
