"""The chart, rendered by the real helm, as Python objects."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "k8s" / "headrace"
VALUES = ROOT / "k8s" / "values"
TOOLS = ROOT / ".cache" / "k8s"

Object = dict[str, Any]


class Pods(NamedTuple):
    """Pods of one shape: whose they are, their labels and their spec."""

    owner: Object
    labels: dict[str, str]
    spec: Object

    @property
    def name(self) -> str:
        return f"{self.owner['kind']}/{self.owner['metadata']['name']}"


def tool(name: str) -> str:
    """Path of helm, helm3 or kubectl, as `make test-k8s` lays them."""
    path = TOOLS / "bin" / name
    if not path.exists():
        pytest.skip("no helm: run make test-k8s")
    return str(path)


def helm(*arguments: str, program: str = "helm") -> subprocess.CompletedProcess[str]:
    """Runs helm; the caller looks at its exit status."""
    return subprocess.run([tool(program), *arguments], capture_output=True, text=True, timeout=60, check=False)


def template(values: str, *sets: str, program: str = "helm") -> subprocess.CompletedProcess[str]:
    """`helm template` of release "run" in namespace "rl"; sets are KEY=VALUE with JSON values."""
    options = [word for item in sets for word in ("--set-json", item)]
    path = str(VALUES / f"{values}.yaml")
    return helm("template", "run", str(CHART), "--namespace", "rl", "--values", path, *options, program=program)


@functools.cache
def _text(values: str, sets: tuple[str, ...], program: str) -> str:
    done = template(values, *sets, program=program)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(values: str, *sets: str, program: str = "helm") -> list[Object]:
    """The objects, fresh ones each time, so that a test may change them."""
    text = _text(values, sets, program)
    return [item for item in yaml.load_all(text, yaml.CSafeLoader) if item]


def refusal(values: str, *sets: str) -> str:
    """What helm says of values that it must not take."""
    done = template(values, *sets)
    assert done.returncode != 0, f"helm took {sets}"
    return done.stderr


def find(objects: list[Object], kind: str, name: str) -> Object:
    """The object of this kind whose name ends so."""
    found = [item for item in objects if item["kind"] == kind and item["metadata"]["name"].endswith(name)]
    assert len(found) == 1, f"{len(found)} of {kind} …{name}"
    return found[0]


def pods(objects: list[Object]) -> Iterator[Pods]:
    """Each shape of pod that the objects would make."""
    for item in objects:
        kind, spec = item["kind"], item.get("spec", {})
        if kind == "Pod":
            yield Pods(item, item["metadata"].get("labels", {}), spec)
        elif kind in ("Deployment", "StatefulSet"):
            yield _pods(item, spec["template"])
        elif kind == "JobSet":
            for job in spec["replicatedJobs"]:
                # Labels that the controllers add, as far as Services select by them.
                added = {"jobset.sigs.k8s.io/job-index": "0", "batch.kubernetes.io/job-completion-index": "0"}
                yield _pods(item, job["template"]["spec"]["template"], **added)
        elif kind == "LeaderWorkerSet":
            template = spec["leaderWorkerTemplate"]
            yield _pods(item, template["leaderTemplate"], **{"leaderworkerset.sigs.k8s.io/worker-index": "0"})
            yield _pods(item, template["workerTemplate"], **{"leaderworkerset.sigs.k8s.io/worker-index": "1"})


def _pods(owner: Object, template: Object, **added: str) -> Pods:
    return Pods(owner, {**template["metadata"]["labels"], **added}, template["spec"])


def selected(selector: dict[str, str], labels: dict[str, str]) -> bool:
    """Whether matchLabels fit."""
    return selector.items() <= labels.items()


# Renders that between them use every template and every branch that changes an object's shape.
MATRIX: dict[str, tuple[str, ...]] = {
    "laptop": ("laptop",),
    "v5e-8": ("v5e-8",),
    "v6e-8": ("v6e-8",),
    "v5p-multi-host": ("v5p-multi-host",),
    "spot-engines": ("spot-engines",),
    "hpa": (
        "laptop",
        'gateway.autoscaling.kind="hpa"',
        'inference.autoscaling.kind="hpa"',
        'environment.autoscaling.kind="hpa"',
        'monitoring.metricFormat="prometheus.googleapis.com|%s|gauge"',
        "monitoring.serviceMonitor=true",
        "monitoring.dashboard=true",
    ),
    "keda-with-password": (
        "laptop",
        'gateway.autoscaling.kind="keda"',
        'inference.autoscaling={"kind":"keda","minReplicas":0}',
        'environment.autoscaling.kind="keda"',
        'redis.auth.existingSecret="redis-password"',
        'monitoring={"podMonitoring":true,"labels":{"team":"rl"}}',
    ),
    "leader-worker-set": (
        "v6e-8",
        'inference.tpu={"accelerator":"tpu-v6e-slice","topology":"4x4","hosts":4,"chipsPerHost":4}',
        "config.inference.tensor_parallel=16",
        'inference.provisioning={"queueName":"tpu","flexStart":true}',
    ),
    "multislice": (
        "v5p-multi-host",
        "trainer.tpu.slices=2",
        'config.trainer.mesh={"fsdp":16,"tensor":4}',
        'trainer.provisioning={"computeClass":"tpu-any","queueName":""}',
    ),
    "single-host-jobset": ("v5e-8", 'trainer.kind="JobSet"', 'storage.run={"existingClaim":"runs"}'),
    "others-engines": (
        "laptop",
        "inference.enabled=false",
        'config.inference={"addresses":["engine.example:30000"],"context_length":128,"kv_cache_tokens":8192}',
    ),
    "others-environment": (
        "laptop",
        'config.environments.search={"address":"search.example:50051"}',
        'environments.guess_number={"executesCode":true,"egress":[{"to":[{"ipBlock":{"cidr":"10.9.0.0/16"}}]}]}',
    ),
    "others-redis": (
        "laptop",
        "redis.enabled=false",
        'redis.external={"existingSecret":"bus","caSecret":"bus-ca","cidr":"10.1.2.3/32"}',
    ),
    "secured": (
        "laptop",
        'tls={"existingSecret":"certificates","clientCertificates":true}',
        'auth={"existingSecret":"token","environmentsSecret":"environment-tokens"}',
        'environment.tlsSecret="environment-certificates"',
        'config.environments.search={"address":"search.example:50051","tls":true,'
        '"token_file":"/etc/headrace-environment-tokens/search"}',
        'config.environments.calculator={"class":"calculator"}',
        'redis={"tlsSecret":"redis-certificates","auth":{"existingSecret":"redis-password"}}',
        'gateway.autoscaling.kind="keda"',
        'monitoring={"podMonitoring":true,"serviceMonitor":true}',
    ),
    "secured-slices": (
        "v5p-multi-host",
        'tls.existingSecret="certificates"',
        'auth.existingSecret="token"',
        'environment.tlsSecret="environment-certificates"',
    ),
    "traced": (
        "laptop",
        'config.telemetry.traces={"endpoint":"http://collector.observability:4318","sample_ratio":0.1}',
        'networkPolicy.traceCollector=[{"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":"observability"}}}]',
    ),
    "no-network-policies": ("laptop", "networkPolicy.enabled=false", "tests.episode=false"),
    "dressed": (
        "laptop",
        'image={"registry":"example.com/rl/","tag":"v2","pullSecrets":[{"name":"pull"}]}',
        'gateway={"image":{"digest":"sha256:' + "0" * 64 + '"},"extraEnv":[{"name":"A","value":"b"}]}',
        'trainer.provisioning={"spot":true,"priorityClassName":"high"}',
        'trainer.nodeSelector={"disk":"fast"}',
        'trainer.tolerations=[{"key":"a","operator":"Exists"}]',
        'trainer.podAnnotations={"a":"b"}',
        'trainer.serviceAccount.annotations={"iam.gke.io/gcp-service-account":"a@b.iam.gserviceaccount.com"}',
        'storage={"run":{"storageClass":"fast"},"compilationCache":{"existingClaim":"cache"}}',
        'networkPolicy.gatewayClients=[{"podSelector":{"matchLabels":{"role":"client"}}}]',
        'extraObjects=[{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"{{ .Release.Name }}-extra"}}]',
        'fullnameOverride="x"',
    ),
}


def matrix(name: str, program: str = "helm") -> list[Object]:
    """One render of the matrix."""
    values, *sets = MATRIX[name]
    return render(values, *sets, program=program)
