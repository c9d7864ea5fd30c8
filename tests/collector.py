"""A collector of traces for tests: a small real HTTP server that takes OTLP and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from collections import defaultdict
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from headrace.tracing import Ids


class Received(NamedTuple):
    """A span as it came."""

    service: str
    name: str
    ids: Ids
    parent_id: int  # 0: none
    links: tuple[Ids, ...]
    attributes: dict[str, object]
    start_ns: int
    end_ns: int


class Collector:
    """Listens on 127.0.0.1 while the body runs; `spans` is what it was sent."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def traces(self) -> dict[int, list[Received]]:
        """Spans by trace."""
        traces: defaultdict[int, list[Received]] = defaultdict(list)
        for span in self.spans:
            traces[span.ids.trace_id].append(span)
        return traces


def _spans(request: ExportTraceServiceRequest) -> Sequence[Received]:
    received = []
    for resource in request.resource_spans:
        service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            received.append(
                Received(
                    service,
                    span.name,
                    Ids(int.from_bytes(span.trace_id), int.from_bytes(span.span_id)),
                    int.from_bytes(span.parent_span_id),
                    tuple(Ids(int.from_bytes(link.trace_id), int.from_bytes(link.span_id)) for link in span.links),
                    {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes},
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                )
            )
    return received
