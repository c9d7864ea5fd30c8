"""Swaps of weights that lie in parts on several devices."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.processes import ROOT

pytestmark = pytest.mark.timeout(400)  # the first start on a machine compiles


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    command = [sys.executable, "-m", "tests.inference.sharded", str(tmp_path_factory.mktemp("sharded"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("count", ["2", "4", "8"])
def test_each_shard_is_the_slice_of_the_published_tensor(found, count):
    it = found[count]
    assert it["right"] == it["shards"] == it["tensors"] * int(count)
    # All but the norms lie in parts, none of them twice, unless there are more devices than key-value heads.
    assert it["parted"] == 2 + 7 * 2


@pytest.mark.parametrize("count", ["2", "4", "8"])
def test_a_swap_on_several_devices_happens_between_two_steps_of_all(found, count):
    it = found[count]
    assert it["largest_error"] <= 1e-4
    assert any(len(spans) == 2 for spans in it["spans"])
    assert [sum(length for _, length in spans) for spans in it["spans"]] == [10, 80, 80, 80]
