"""Every algorithm of configs/algorithms trains guess_number through all services: a few steps each."""

from pathlib import Path

import pytest

from tests import processes
from tests.loop_run import LoopRun

FAMILY = sorted(path.stem for path in (processes.ROOT / "configs" / "algorithms").glob("*.yaml"))
STEPS = 5

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", FAMILY)
def test_trains_a_few_steps(tmp_path: Path, name: str):
    changes = {
        "trainer.steps": STEPS,
        "trainer.groups_per_step": 8,
        "trainer.minibatches": 2,
        "trainer.checkpoint.every_steps": 100,
        "trainer.optimizer.warmup_steps": 1,
    }
    with LoopRun(tmp_path, f"configs/algorithms/{name}.yaml", changes) as run:
        run.start()
        run.wait()
        lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line["skipped_updates"] == 0
        assert line["loss"] is not None
        assert line["gradient_norm"] > 0
        assert line["staleness_max"] <= run.config.trainer.max_staleness
        assert line["effective_sample_fraction"] > 0
        assert line["rejected"] < 1  # the first steps move far, so a rejection takes much
    if run.config.trainer.critic:
        assert all(line["value_loss"] > 0 for line in lines)
    if run.config.trainer.loss.refers:
        assert lines[-1]["reference_kl"] > 0
