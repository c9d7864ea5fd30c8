"""When a failing engine is left alone: times are given, nothing waits."""

import pytest

from services.rollout.circuit import Circuit, CircuitLimits, State


@pytest.fixture
def circuit():
    return Circuit(CircuitLimits(failures=3, first_s=1.0, longest_s=8.0))


def fail(circuit, now_s, times=1):
    for _ in range(times):
        probe = circuit.enter(now_s)
        opened = circuit.failed(now_s, probe=probe)
    return opened


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not(circuit):
    fail(circuit, 0, 2)
    circuit.succeeded(probe=circuit.enter(0))
    assert not fail(circuit, 0, 2)
    assert circuit.state(0) is State.CLOSED
    assert fail(circuit, 0)
    assert circuit.state(0) is State.OPEN and not circuit.admits(0)


def test_one_call_decides_about_a_half_open_one(circuit):
    fail(circuit, 0, 3)
    assert 0.75 <= circuit.until_s <= 1
    now_s = circuit.until_s
    assert circuit.state(now_s) is State.HALF_OPEN and circuit.admits(now_s)
    assert circuit.enter(now_s)
    assert not circuit.admits(now_s)
    circuit.succeeded(probe=True)
    assert circuit.state(now_s) is State.CLOSED and circuit.admits(now_s)


def test_the_pause_doubles_up_to_its_limit(circuit):
    fail(circuit, 0, 3)
    now_s, pauses = circuit.until_s, []
    for _ in range(6):
        assert fail(circuit, now_s)
        pauses.append(circuit.until_s - now_s)
        now_s = circuit.until_s
    for pause_s, most_s in zip(pauses, [2, 4, 8, 8, 8, 8], strict=True):
        assert 0.75 * most_s <= pause_s <= most_s


def test_calls_that_were_under_way_tell_nothing(circuit):
    fail(circuit, 0, 3)
    until_s = circuit.until_s
    assert not circuit.failed(0.1, probe=False)
    circuit.succeeded(probe=False)
    assert circuit.until_s == until_s and circuit.state(0.1) is State.OPEN


def test_a_probe_that_was_given_up_leaves_it_half_open(circuit):
    fail(circuit, 0, 3)
    now_s = circuit.until_s
    circuit.left(probe=circuit.enter(now_s))
    assert circuit.state(now_s) is State.HALF_OPEN and circuit.admits(now_s)


def test_an_engine_that_came_back_is_tried_at_once(circuit):
    fail(circuit, 0, 3)
    circuit.try_now(0.1)
    assert circuit.state(0.1) is State.HALF_OPEN
