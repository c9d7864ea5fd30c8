"""Logs and metrics, the same in every service.

Logs go to stderr, one line a record, as text or JSON. Metrics are Prometheus's, served over HTTP; a service names them
headrace_<service>_<what>_<unit>.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Literal

import prometheus_client

from headrace import address
from headrace.errors import AddressInUse


def configure(service: str, *, level: str = "info", log_format: Literal["text", "json"] = "text") -> None:
    """Sends the process's logs to stderr under the service's name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service) if log_format == "json" else _text_formatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("jax", "absl", "asyncio", "aiohttp.access", "httpx"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))


def serve_metrics(listen: str) -> int:
    """Serves /metrics on "host:port" from a thread and returns the port.

    Raises:
        AddressInUse: the port is taken.
        StartupError: it is no address.
    """
    host, port = address.of_flag("--metrics-listen", listen)
    try:
        server, _ = prometheus_client.start_http_server(port, addr=host or "0.0.0.0")
    except OSError as error:
        raise AddressInUse(f"--metrics-listen {listen} cannot be bound: is the port taken? choose another") from error
    return server.server_port


def _text_formatter(service: str) -> logging.Formatter:
    return logging.Formatter(f"%(asctime)s %(levelname).1s {service} %(name)s: %(message)s", datefmt="%H:%M:%S")


class _JsonFormatter(logging.Formatter):
    """One JSON object a line, with the names that Cloud Logging reads."""

    def __init__(self, service: str):
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "severity": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)
