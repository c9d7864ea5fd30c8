"""services.trainer.guard: when a run is given up, and when not."""

import logging

import pytest

from services.trainer.guard import Diverged, Guard


def measured(skipped: int = 0, norm: float = 1.0) -> dict[str, float]:
    return {"skipped_updates": float(skipped), "gradient_norm": norm}


def test_ends_a_run_after_so_many_skipped_updates_in_a_row():
    guard = Guard(max_skipped_updates=4, updates_per_step=2)
    guard.watch(measured(2), step=1)
    guard.watch(measured(1), step=2)  # one of the two was made
    guard.watch(measured(2), step=3)
    with pytest.raises(Diverged, match="the last 5 updates were skipped"):
        guard.watch(measured(2), step=4)


def test_an_update_that_is_made_begins_the_count_anew():
    guard = Guard(max_skipped_updates=2, updates_per_step=1)
    for step in range(10):
        guard.watch(measured(step % 2), step=step)


def test_tells_of_a_jump_of_the_gradient(caplog: pytest.LogCaptureFixture):
    guard = Guard(max_skipped_updates=2, updates_per_step=1)
    for step in range(5):
        assert guard.watch(measured(norm=2.0), step=step) == {"gradient_norm_spike": 1.0}
    with caplog.at_level(logging.WARNING):
        assert guard.watch(measured(norm=50.0), step=5) == {"gradient_norm_spike": 25.0}
    assert "25 times that of recent steps" in caplog.text


def test_a_skipped_update_s_norm_is_no_measure():
    guard = Guard(max_skipped_updates=9, updates_per_step=1)
    guard.watch(measured(1, norm=float("nan")), step=1)
    assert guard.watch(measured(norm=3.0), step=2) == {"gradient_norm_spike": 1.0}
