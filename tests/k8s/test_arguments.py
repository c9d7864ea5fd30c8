"""The arguments that containers get are ones that the programs take: the real ones, started with them."""

import subprocess
import sys

import pytest

from tests.k8s.rendering import MATRIX, ROOT, matrix, pods

# What images start, by component.
PROGRAMS = {
    "trainer": "services.trainer",
    "inference": "services.inference",
    "gateway": "services.rollout",
    "environment": "services.envs",
}


def arguments(name, component, *, owner="", changed=()):
    """A container's arguments, its variables put in, and a run file that is not there: the last thing to be missed."""
    for item in pods(matrix(name)):
        if item.labels["app.kubernetes.io/component"] == component and owner in item.name:
            words = item.spec["containers"][0]["args"]
            words = [word.replace("$(POD_NAME)", "run-0").replace("$(LWS_WORKER_INDEX)", "0") for word in words]
            words = [word.replace("$(LWS_LEADER_ADDRESS)", "leader") for word in words]
            return [word.replace("/etc/headrace/", "/absent/") for word in words] + list(changed)
    raise LookupError(f"{name} has no {component}")


def complaint(component, words):
    """How the program ends with these arguments: it must get past them, to the run file."""
    done = subprocess.run(
        [sys.executable, "-m", PROGRAMS[component], *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 2
    return done.stderr


@pytest.mark.parametrize("component", PROGRAMS)
def test_programs_take_their_containers_arguments(component):
    assert "/absent/run.yaml: cannot be read" in complaint(component, arguments("laptop", component))


def test_every_render_gives_the_same_arguments():
    """So that one of them, tried above, stands for all; engines of several hosts apart. A JobSet's trainer may end."""
    for component in PROGRAMS:
        shapes = {
            tuple(word for word in arguments(name, component) if not word.startswith(("--environment=", "--stay")))
            for name in MATRIX
            if (name, component) not in {("others-engines", "inference"), ("leader-worker-set", "inference")}
        }
        assert len(shapes) == 1, shapes


def test_a_trainer_stays_where_it_would_be_started_again():
    assert "--stay" in arguments("laptop", "trainer")
    assert "--stay" not in arguments("v5p-multi-host", "trainer")


def test_a_wrong_argument_is_seen():
    assert "unrecognized arguments" in complaint("environment", arguments("laptop", "environment", changed=["--x=1"]))


def test_an_engine_of_several_hosts_takes_its_arguments():
    words = arguments("leader-worker-set", "inference")
    assert any(word.startswith("--node-rank") for word in words)
    assert "/absent/run.yaml: cannot be read" in complaint("inference", words)
