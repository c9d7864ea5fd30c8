"""Each fault of the pinned sglang-jax is there without its fix, and gone with it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.processes import ROOT

pytestmark = pytest.mark.timeout(400)  # the first start on a machine compiles


def _found(*arguments: str) -> dict:
    command = [sys.executable, "-m", "tests.inference.faults", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def stock() -> dict:
    return _found("--stock")


@pytest.fixture(scope="module")
def fixed() -> dict:
    return _found()


def test_host_arrays_are_copied(stock, fixed):
    assert stock["host_array_aliased"]
    assert not fixed["host_array_aliased"]


def test_each_token_is_sent_once(stock, fixed):
    assert stock["logprobs_of_120_tokens"] == 270
    assert fixed["logprobs_of_120_tokens"] == 120


def test_cache_locations_are_as_many_as_needed(stock, fixed):
    assert stock["key_slots_of_a_decode_step"] == 4 * 512
    assert fixed["key_slots_of_a_decode_step"] == 4 * 128


def test_heads_of_64_are_cut_back_and_the_cache_is_never_copied(stock, fixed):
    assert stock["attention_width"] == 4 * 128
    assert fixed["attention_width"] == 4 * 64
    assert stock["copies_of_the_cache"] > 0
    assert fixed["copies_of_the_cache"] == 0


def test_seeded_sampling_follows_the_distribution(stock, fixed):
    assert stock["p_value_of_seeded_sampling"] < 1e-9
    assert fixed["p_value_of_seeded_sampling"] > 1e-4


def test_thresholds_are_searched_only_when_asked(stock, fixed):
    assert stock["threshold_searches_that_always_run"] > 0
    assert fixed["threshold_searches_that_always_run"] == 0


def test_another_version_is_refused(fixed):
    assert fixed["what_another_version_hears"].startswith("sglang-jax 0.2.0 is installed, but this engine is made for")
