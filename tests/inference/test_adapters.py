"""Versions that bring a LoRA adapter alone."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from services.inference.adapter import is_buffer, split
from tests.processes import ROOT

pytestmark = pytest.mark.timeout(400)  # the first start on a machine compiles


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    command = [sys.executable, "-m", "tests.inference.adapters", str(tmp_path_factory.mktemp("adapters"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_adapter_is_swapped_while_requests_run(found):
    # Exact, token by token, against base + scaling * B A of the version that sampled each.
    assert found["largest_error"] <= 1e-4
    assert any(len(spans) == 2 for spans in found["spans"])
    assert [sum(length for _, length in spans) for spans in found["spans"]] == [10, 80, 80, 80]


def test_the_base_stays_bit_for_bit(found):
    assert found["base_unchanged"] and found["base_tensors"] > 10
    assert found["programs_built_since"] == 0


def test_an_adapter_needs_its_base_once(found):
    assert "without its base" in found["refused"]


def test_adapter_tensors_are_told_by_their_names():
    a, b, w = np.zeros((2, 3)), np.zeros((4, 2)), np.zeros((4, 3))
    tensors = {"l.0.q.weight": w, "base_model.model.l.0.q.lora_A.weight": a, "l.0.q.lora_B": b}
    base, adapter = split(tensors)
    assert base == {"l.0.q.weight": w}
    assert {name: tensor.shape for name, tensor in adapter.items()} == {
        "l.0.q.A_buffer": (1, 2, 3),
        "l.0.q.B_buffer": (1, 4, 2),
    }
    assert all(map(is_buffer, adapter)) and not is_buffer("l.0.q.weight")
