"""One gateway process under many episodes: nothing grows from wave to wave, nothing fails unseen, nothing is left open
when it is killed."""

import contextlib
from pathlib import Path

import pytest

from headrace import trajectory as records
from tests.rollout.cluster import Cluster, metric
from tests.rollout.rig import eventually, task

ONE_TURN = {"numbers": 8, "turns": 1}
WAVES = 3


@pytest.fixture
def cluster(tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda **overrides: Cluster(tmp_path, stack, script={"tokens": "random"}, **overrides)


@pytest.mark.parametrize("episodes", [300, pytest.param(2000, marks=pytest.mark.slow)])
async def test_waves_of_episodes_leave_nothing_behind(cluster, episodes):
    groups = episodes // 10
    run = cluster(
        rollout__max_concurrent_episodes=episodes,
        rollout__group_size=10,
        rollout__engine_window_first=episodes,  # else the window grows from wave to wave
        rollout__engine_window_most=episodes,
        environments__guess_number__max_concurrent_episodes=episodes,
        environments__guess_number__options=ONE_TURN,
    )
    gateway = run.gateway()
    await run.streams.open()
    files, resident = [], []
    for wave in range(WAVES):
        numbers = range(wave * groups, (wave + 1) * groups)
        held = [task(number, min_policy_version=wave + 1) for number in numbers]  # until the engine is that new
        await run.streams.issue(held, first_sequence=numbers[0])
        await eventually(lambda: metric(gateway, "running_episodes") == episodes, timeout_s=120)
        await eventually(lambda: metric(gateway, "open_engine_calls") == episodes, timeout_s=120)
        files.append(_open_files(gateway.pid))
        resident.append(_resident_bytes(gateway.pid))
        await run.set_policy_version(wave + 1)
        ended = await run.groups(groups, timeout_s=120)
        assert all(records.is_trainable(trajectory) for group in ended for trajectory in group.trajectories)
        await eventually(lambda: metric(gateway, "running_episodes") == 0, timeout_s=60)
    print(f"{files} files, {[size >> 20 for size in resident]} MiB")
    # One connection an episode to its engine; those to Redis come with the first wave's publications, and stay.
    assert max(files) <= episodes + groups + 32 and files[2] <= files[1] + 16
    assert max(resident) <= 1.3 * resident[0] + (16 << 20)
    log = (run.folder / "gateway-0.log").read_text()
    assert "Traceback" not in log and "never retrieved" not in log and "was destroyed" not in log


async def test_a_killed_gateway_leaves_no_episode_open(cluster):
    run = cluster(rollout__max_concurrent_episodes=20, environments__guess_number__options=ONE_TURN)
    gateway = run.gateway()
    await run.issue(10, held=True)

    def open_episodes():
        return metric(run.environment, 'active_episodes{environment="guess_number"}', service="envs")

    await eventually(lambda: open_episodes() == 20, timeout_s=120)
    gateway.kill()
    await eventually(lambda: open_episodes() == 0, timeout_s=60)
    assert run.environment.running


def _open_files(pid):
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
