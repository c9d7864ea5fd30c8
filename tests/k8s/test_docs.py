"""docs/gke.md names the values files that there are, and the commands in it are ones that helm takes."""

import re
import subprocess

import yaml

from tests.k8s.rendering import CHART, ROOT, VALUES, helm

TEXT = (ROOT / "docs" / "gke.md").read_text()


def test_every_values_file_is_described():
    assert set(re.findall(r"`([\w-]+\.yaml)`", TEXT)) >= {path.name for path in VALUES.glob("*.yaml")}
    for path in re.findall(r"(?:k8s|requirements|services|tools)/[\w./*-]+\w", TEXT):
        assert list(ROOT.glob(path.replace("NAME", "laptop"))) or "$" in path, path


def test_the_values_that_it_makes_are_ones_that_helm_takes(tmp_path):
    (line,) = re.findall(r"^sed .*$", TEXT, re.MULTILINE)
    environment = {"PROJECT": "my-project", "BUCKET": "my-project-headrace", "PATH": "/usr/bin:/bin"}
    script = line.replace("k8s/values", str(VALUES))
    subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment, check=True, timeout=10)
    done = helm("template", "run", str(CHART), "--namespace", "headrace", "--values", str(tmp_path / "my-values.yaml"))
    assert done.returncode == 0, done.stderr
    assert not re.search(r"\b(PROJECT|BUCKET)\b", done.stdout)
    accounts = [
        item["metadata"]["name"] for item in yaml.safe_load_all(done.stdout) if item["kind"] == "ServiceAccount"
    ]
    for name in re.findall(r"^grant (\w+) ", TEXT, re.MULTILINE):
        assert f"run-headrace-{name}" in accounts
