"""headrace.tracing: off it is nothing; on it never stands in the way."""

import asyncio
import logging
import socket
import subprocess
import sys
import time

import pytest

from headrace import config, tracing
from headrace.tracing import Ids
from tests.collector import Collector


@pytest.fixture
def traced():
    """Turns tracing on, and off again when the test ends."""

    def configure(endpoint, **changes):
        values = {"instance": "gateway-0", "run_id": "run", "sample_ratio": 1.0, **changes}
        tracing.configure("gateway", endpoint=endpoint, **values)
        return tracing.recorder()

    yield configure
    tracing.stop()


def test_off_it_imports_nothing_and_sends_nothing():
    program = (
        "import sys; from headrace import tracing, rpc\n"
        "tracing.configure('gateway', instance='g', run_id='r', endpoint='', sample_ratio=1.0)\n"
        "with tracing.trajectory('t') as span, tracing.span('s'), tracing.received('r', '00-1-2-01'):\n"
        "    span.set(a=1); tracing.note(b=2)\n"
        "    assert not span.recorded and tracing.headers() == {} and tracing.metadata() == ()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_without_the_package_the_remedy_is_named():
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from headrace import rpc, tracing\n"
        "async def run():\n"
        "    tracing.configure('g', instance='g', run_id='r', endpoint='http://127.0.0.1:1', sample_ratio=1.0)\n"
        "rpc.main(run)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: telemetry.traces.endpoint is set, but OpenTelemetry is not installed")
    assert "install headrace[traces]" in done.stderr
    assert done.stderr.count("\n") == 1


def test_spans_are_nested_and_named_by_their_trajectory(traced):
    with Collector() as collector:
        traced(collector.endpoint)
        with tracing.trajectory("00000001-0", environment="e") as span:
            with tracing.span("session", attempt=1):
                header = tracing.headers()[tracing.HEADER]
            span.set(status="completed")
        with tracing.span("of no trajectory"):
            assert tracing.headers() == {}
        with tracing.received("generate", header):
            pass
        tracing.stop()
    root, session, generate = (
        next(s for s in collector.spans if s.name == n) for n in ("episode", "session", "generate")
    )
    assert len(collector.spans) == 3
    assert root.ids == tracing.trajectory_ids("run", "00000001-0", "gateway-0")
    assert root.attributes == {
        "headrace.trajectory_id": "00000001-0",
        "headrace.environment": "e",
        "headrace.status": "completed",
    }
    assert (session.parent_id, generate.parent_id) == (root.ids.span_id, session.ids.span_id)
    assert {span.ids.trace_id for span in collector.spans} == {root.ids.trace_id}


async def test_episodes_that_run_at_once_do_not_mix(traced):
    async def episode(name):
        with tracing.trajectory(name):
            await asyncio.sleep(0.01)
            with tracing.span("session"):
                await asyncio.sleep(0.01)

    with Collector() as collector:
        traced(collector.endpoint)
        await asyncio.gather(*(episode(f"{number:08d}-0") for number in range(20)))
        await asyncio.to_thread(tracing.stop)
    assert len(collector.traces) == 20
    for spans in collector.traces.values():
        (root,) = (span for span in spans if not span.parent_id)
        assert {span.parent_id for span in spans} == {0, root.ids.span_id}


def test_what_is_not_sampled_is_sampled_nowhere(traced):
    with Collector() as collector:
        recorder = traced(collector.endpoint, sample_ratio=0.25)
        sampled = 0
        for number in range(400):
            with tracing.trajectory(f"{number:08d}-0") as span, tracing.span("session"):
                header, recorded = tracing.headers()[tracing.HEADER], span.recorded
            assert header.endswith("-01") == recorded
            assert recorder.samples(tracing.trajectory_ids("run", f"{number:08d}-0", "gateway-0")) == recorded
            sampled += recorded
            with tracing.received("generate", header) as answer:
                assert answer.recorded == recorded
        tracing.stop()
    assert 60 < sampled < 140
    assert len(collector.spans) == 3 * sampled


@pytest.mark.parametrize("endpoint", ["refuses", "is silent"])
def test_a_dead_collector_costs_spans_and_nothing_else(traced, endpoint, caplog):
    with socket.socket() as place, caplog.at_level(logging.WARNING):
        place.bind(("127.0.0.1", 0))
        if endpoint == "is silent":
            place.listen()
        traced(f"http://127.0.0.1:{place.getsockname()[1]}")
        began = time.process_time()
        for number in range(20_000):  # more than its queue holds
            with tracing.trajectory(f"{number:08d}-0"):
                pass
        spent_s = time.process_time() - began
        started = time.monotonic()
        tracing.stop()
        stopped_s = time.monotonic() - started
    print(f"{spent_s / 20_000 * 1e6:.1f} us a span, stopped after {stopped_s:.1f} s")
    assert stopped_s < 60  # it waits 3 s; without that limit the exporter would go on for minutes
    lines = [record for record in caplog.records if record.name.startswith(("headrace", "opentelemetry"))]
    assert len(lines) <= 1
    assert all("no trace collector answers" in record.getMessage() for record in lines)


def test_traceparent_is_w3cs():
    ids = Ids(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7)
    header = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"  # the standard's own example
    assert tracing.format_traceparent(ids, sampled=True) == header
    assert tracing.parse_traceparent(header) == (ids, True)
    assert tracing.parse_traceparent(header[:-1] + "0") == (ids, False)
    assert tracing.parse_traceparent(f"01{header[2:]}-of a later version") == (ids, True)
    for wrong in ("", "x", f"ff{header[2:]}", header.upper(), f"00-{'0' * 32}-{'1' * 16}-01", header[:-3]):
        assert tracing.parse_traceparent(wrong) is None


def test_ids_differ_where_they_must():
    one = tracing.trajectory_ids("run", "00000001-0", "gateway-0")
    other_gateway = tracing.trajectory_ids("run", "00000001-0", "gateway-1")
    assert one.trace_id == other_gateway.trace_id
    assert one.span_id != other_gateway.span_id
    assert one.trace_id != tracing.trajectory_ids("run", "00000001-1", "gateway-0").trace_id
    assert one.trace_id != tracing.trajectory_ids("another", "00000001-0", "gateway-0").trace_id


def test_an_endpoint_that_is_none_is_refused():
    with pytest.raises(config.ConfigError, match=r"telemetry.traces.endpoint: must be http://HOST:PORT"):
        config.load("configs/guess_number.yaml", overrides={"telemetry.traces.endpoint": "collector:4318"})
