"""headrace export: any checkpoint as a Hugging Face folder."""

import shutil
import subprocess
import sys

import pytest
from safetensors.numpy import load_file

from tests.trainer import rig

pytestmark = pytest.mark.timeout(400)


def export(*arguments):
    command = [sys.executable, "-m", "headrace", "export", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


async def test_writes_the_newest_checkpoint_or_another(streams, redis_url, tmp_path):
    config = rig.run_file(tmp_path, redis_url, steps=3)
    with rig.trainer(config) as trainer:
        async with rig.serving(streams):
            assert await trainer.ended() == 0
    shutil.copy(config, trainer.run / "config.yaml")  # as `headrace run` writes it

    done = export(trainer.run, tmp_path / "newest")
    assert (done.returncode, done.stdout.split()[:6]) == (0, ["wrote", "the", "policy", "of", "step", "3"])
    newest = load_file(tmp_path / "newest" / "model.safetensors")
    final = load_file(trainer.run / "policy" / "model.safetensors")
    assert all((newest[name] == value).all() for name, value in final.items())
    assert (tmp_path / "newest" / "tokenizer.json").exists()

    assert export(trainer.run, tmp_path / "older", "--step", 2, "--dtype", "bfloat16").returncode == 0
    older = load_file(tmp_path / "older" / "model.safetensors")
    assert {value.dtype.name for value in older.values()} == {"bfloat16"}
    assert any((older[name].astype("float32") != final[name]).any() for name in final)

    absent = export(trainer.run, tmp_path / "absent", "--step", 7)
    assert absent.returncode == 2
    assert "there is no checkpoint of step 7" in absent.stderr
    assert "there are: 2, 3" in absent.stderr


def test_a_folder_that_is_no_run_s_is_told(tmp_path):
    done = export(tmp_path, tmp_path / "out")
    assert done.returncode == 2
    assert "give the folder of a run" in done.stderr
