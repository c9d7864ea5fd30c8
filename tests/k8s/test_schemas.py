"""Every render against the schemas of three Kubernetes releases and, where they lie at hand, of custom resources."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.k8s.rendering import MATRIX, ROOT, TOOLS, find, matrix

VERSIONS = ("1.31", "1.34", "1.37")
CRDS = Path(os.environ.get("HEADRACE_CRDS", ROOT.parent / "shared" / "crds"))


def errors(objects, *options):
    """What tools/validate_manifests.py finds, in the environment that has the schemas."""
    python = TOOLS / "venv" / "bin" / "python"
    if not python.exists():
        pytest.skip("no schemas: run make test-k8s")
    versions = [word for version in VERSIONS for word in ("--kubernetes", version)]
    done = subprocess.run(
        [str(python), "-m", "tools.validate_manifests", *versions, *options],
        input=json.dumps(objects),
        capture_output=True,
        text=True,
        timeout=170,
        check=True,
        cwd=ROOT,
    )
    return json.loads(done.stdout)


def test_renders_fit_the_schemas():
    distinct = {json.dumps(item): item for name in MATRIX for item in matrix(name)}
    objects = list(distinct.values())
    options = ["--crds", str(CRDS)] if CRDS.is_dir() else []
    found = [(objects[index]["metadata"]["name"], *rest) for index, *rest in errors(objects, *options)]
    assert found == []


def misspelt_probe(objects):
    spec = find(objects, "Deployment", "-gateway")["spec"]["template"]["spec"]
    spec["containers"][0]["livenesProbe"] = spec["containers"][0].pop("livenessProbe")


def number_as_an_annotation(objects):
    find(objects, "Deployment", "-gateway")["spec"]["template"]["metadata"]["annotations"]["a"] = 1


def misspelt_field_in_a_job_set(objects):
    job = find(objects, "JobSet", "-trainer")["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["template"]["spec"]["restartPolicies"] = "Never"


def misspelt_field_of_a_pool(objects):
    template = find(objects, "LeaderWorkerSet", "-inference")["spec"]["leaderWorkerTemplate"]
    template["workerTemplate"]["spec"]["containers"][0]["arguments"] = []


def unknown_kind(objects):
    objects.append({"apiVersion": "apps/v1", "kind": "Deploymint", "metadata": {"name": "x"}})


def misspelt_job_set_field(objects):
    find(objects, "JobSet", "-trainer")["spec"]["failurePolicies"] = {}


def misspelt_trigger_field(objects):
    find(objects, "ScaledObject", "-gateway")["spec"]["maxReplicas"] = 3


def number_for_a_pool_size(objects):
    find(objects, "LeaderWorkerSet", "-inference")["spec"]["leaderWorkerTemplate"]["size"] = "four"


def misspelt_monitor_field(objects):
    find(objects, "PodMonitoring", "-gateway")["spec"]["endpoint"] = []


MUTATIONS = (
    ("laptop", misspelt_probe, False),
    ("laptop", number_as_an_annotation, False),
    ("laptop", unknown_kind, False),
    ("v5p-multi-host", misspelt_field_in_a_job_set, False),
    ("leader-worker-set", misspelt_field_of_a_pool, False),
    ("v5p-multi-host", misspelt_job_set_field, True),
    ("v6e-8", misspelt_trigger_field, True),
    ("leader-worker-set", number_for_a_pool_size, True),
    ("v5e-8", misspelt_monitor_field, True),
)


@pytest.mark.parametrize("custom", [False, True], ids=["core", "custom"])
def test_schemas_see_their_faults(custom):
    """One run of the validator for all mutations: reading the schemas takes most of its time."""
    if custom and not CRDS.is_dir():
        pytest.skip("no schemas of custom resources: set HEADRACE_CRDS")
    objects, expected = [], {}
    for render, mutate, is_custom in MUTATIONS:
        if is_custom == custom:
            changed, whole = matrix(render), matrix(render)
            mutate(changed)
            for item in (item for item in changed if item not in whole):
                expected[len(objects)] = mutate.__name__
                objects.append(item)
    assert len(expected) == sum(is_custom == custom for _, _, is_custom in MUTATIONS)
    found = {index for index, *_ in errors(objects, *(["--crds", str(CRDS)] if custom else []))}
    assert [name for index, name in expected.items() if index not in found] == []
