"""The commands of docs/gke.md, run as a shell runs them: the real helm and kubectl, and no cluster that answers.

What needs an account (gcloud), a registry (docker push) or a download is noted instead of run. A wrong flag, file or
quotation mark shows; what only a cluster can say does not.
"""

import os
import re
import shutil
import subprocess

import pytest

from tests.k8s.rendering import ROOT, pods, render, tool

TEXT = (ROOT / "docs" / "gke.md").read_text()
SHELL = "\n".join(re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))
# What a machine type of the page's node pools has: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
MACHINES = {
    "ct5lp-hightpu-1t": ("tpu-v5-lite-podslice", 1),
    "ct5lp-hightpu-8t": ("tpu-v5-lite-podslice", 8),
    "ct5p-hightpu-4t": ("tpu-v5p-slice", 4),
    "ct6e-standard-1t": ("tpu-v6e-slice", 1),
    "ct6e-standard-8t": ("tpu-v6e-slice", 8),
}
_NOTE = '#!/bin/sh\necho "$(basename "$0") $*" >> "$NOTES"\ncase "$*" in "projects describe"*) echo 123456;; esac\n'
_RUN = '#!/bin/sh\ncase "$*" in *https://*) ;; *) {tool} "$@" 2>> "$NOTES";; esac\n'
_NO_CLUSTER = """
apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: none, context: {cluster: none, user: ""}}]
current-context: none
"""


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    """The lines that the programs noted, and what helm and kubectl complained of."""
    folder = tmp_path_factory.mktemp("gke")
    (folder / "bin").mkdir()
    programs = {name: _NOTE for name in ("gcloud", "docker", "hf")}
    programs |= {name: _RUN.format(tool=tool(name)) for name in ("helm", "kubectl")}
    for name, text in programs.items():
        path = folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    for name in ("k8s", "services", "requirements"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "kubeconfig").write_text(_NO_CLUSTER)
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "HOME": str(folder),
        "NOTES": str(folder / "notes"),
        "KUBECONFIG": str(folder / "kubeconfig"),
    }
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-c", SHELL],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert not done.stderr, done.stderr  # the shell's own: syntax, commands that there are not
    assert "PROJECT" not in (folder / "my-values.yaml").read_text()
    return (folder / "notes").read_text().splitlines()


def test_helm_and_kubectl_miss_nothing_but_a_cluster(notes):
    complaints = [line for line in notes if line.split()[0] not in ("gcloud", "docker", "hf")]
    assert len(complaints) >= SHELL.count("kubectl") - SHELL.count("kubectl apply --server-side")
    for line in complaints:
        assert re.search(r"connection refused|was refused|cluster unreachable", line), line


def test_images_are_built_from_files_that_there_are(notes):
    builds = [line for line in notes if line.startswith("docker build")]
    assert {re.search(r"headrace-(\w+):", line)[1] for line in builds} == {"envs", "rollout", "trainer", "inference"}
    for line in builds:
        for path in re.findall(r"(?:--file |REQUIREMENTS=)(\S+)", line):
            assert (ROOT / path).is_file(), line


def test_every_pool_of_the_page_was_made(notes):
    made = [line for line in notes if "node-pools create" in line]
    assert len(made) == SHELL.count("\npool ")
    assert all(re.search(r"--cluster headrace --location europe-west4-a --machine-type", line) for line in made)


@pytest.mark.parametrize("values", ["v5e-8", "v6e-8", "spot-engines", "v5p-multi-host"])
def test_node_pools_have_the_chips_that_the_values_ask_for(values):
    (section,) = re.findall(rf"^# {values}\.yaml(.*?)(?=^#|^```)", SHELL + "\n```", re.MULTILINE | re.DOTALL)
    machines = dict(re.findall(r"^pool (\w+) --machine-type (\S+)", section, re.MULTILINE))
    if "the trainer's pool as above" in section:
        machines["trainer"] = "ct6e-standard-8t"
    wanted = {}
    for item in pods(render(values)):
        component = item.labels["app.kubernetes.io/component"]
        if component in ("trainer", "inference"):
            chips = int(item.spec["containers"][0]["resources"]["limits"]["google.com/tpu"])
            wanted[component] = (item.spec["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"], chips)
    assert {"trainer": MACHINES[machines["trainer"]], "inference": MACHINES[machines["engines"]]} == wanted
