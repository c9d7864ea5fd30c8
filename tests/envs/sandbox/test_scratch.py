"""services.envs.sandbox.scratch: directories of the dead are removed, those of the living are not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.envs.sandbox import scratch
from tests import processes

# Makes a directory for a sandbox, fills it, and waits for its input to end.
OWNER = """
import os, sys
from services.envs.sandbox import scratch
path = scratch.make()
os.makedirs(path + "/" + "/".join("d" * 300))
open(path + "/left", "w").close()
os.chmod(path, 0)
print(path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=processes.ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_what_a_killed_server_left_is_removed_by_the_next(owner, tmp_path):
    process, path = owner
    assert path.is_relative_to(tmp_path) and scratch.sweep(str(tmp_path)) == []
    assert path.exists()
    process.kill()
    process.wait()
    assert scratch.sweep(str(tmp_path)) == [str(path.parent)]
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_ends_leaves_nothing(owner, tmp_path):
    process, _ = owner
    process.stdin.close()
    assert process.wait(60) == 0
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_server_s_stays(tmp_path):
    (tmp_path / f"{scratch.PREFIX}being-made").mkdir()
    (tmp_path / "sandbox-of-somebody").mkdir()
    assert scratch.sweep(str(tmp_path)) == [] and len(list(tmp_path.iterdir())) == 2
