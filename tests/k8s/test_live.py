"""On a real cluster, where KUBECONFIG names one: its API server takes every object."""

import os
import subprocess

import pytest

from tests.k8s.rendering import CHART, VALUES, helm, tool

pytestmark = pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="no cluster: set KUBECONFIG")
NAMESPACE = "headrace-test"


@pytest.fixture
def namespace():
    """A namespace that refuses pods which are not restricted."""
    subprocess.run([tool("kubectl"), "create", "namespace", NAMESPACE], check=True, timeout=60)
    label = "pod-security.kubernetes.io/enforce=restricted"
    subprocess.run([tool("kubectl"), "label", "namespace", NAMESPACE, label], check=True, timeout=60)
    yield NAMESPACE
    subprocess.run([tool("kubectl"), "delete", "namespace", NAMESPACE, "--wait=false"], check=True, timeout=60)


def test_the_api_server_takes_the_chart(namespace):
    values = str(VALUES / "laptop.yaml")
    done = helm("install", "run", str(CHART), "--namespace", namespace, "--values", values, "--dry-run=server")
    assert done.returncode == 0, done.stderr
