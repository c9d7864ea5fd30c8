"""Network policies let through what the services need, and nothing else."""

import itertools

import pytest

from tests.k8s.network import allowed
from tests.k8s.rendering import find, matrix, pods

GRPC, HTTP, REDIS, METRICS = 50051, 30000, 6379, 9090
NEEDED = {
    ("trainer", "redis", REDIS),
    ("gateway", "redis", REDIS),
    ("gateway", "environment", GRPC),
    ("gateway", "inference", HTTP),
    ("inference", "trainer", GRPC),
    ("test", "trainer", GRPC),
    ("test", "gateway", GRPC),
    ("test", "environment", GRPC),
    ("test", "inference", HTTP),
}


def components(objects):
    return {item.labels["app.kubernetes.io/component"]: item for item in pods(objects)}


@pytest.mark.parametrize("name", ["laptop", "v5e-8", "keda-with-password"])
def test_exactly_the_needed_connections_pass(name):
    objects = matrix(name)
    found = components(objects)
    passing = {
        (source, target, port)
        for source, target in itertools.permutations(found, 2)
        for port in (GRPC, HTTP, REDIS, METRICS)
        if allowed(objects, found[source], found[target], port)
    }
    assert passing == NEEDED


@pytest.mark.parametrize(("name", "component"), [("v5p-multi-host", "trainer"), ("leader-worker-set", "inference")])
def test_hosts_of_a_slice_reach_each_other(name, component):
    objects = matrix(name)
    host = components(objects)[component]
    assert allowed(objects, host, host, 8471)
    other = matrix("laptop")
    assert not allowed(other, components(other)[component], components(other)[component], 8471)


def test_environments_reach_nothing_unless_told():
    assert find(matrix("laptop"), "NetworkPolicy", "-env-guess-number")["spec"]["egress"] == []
    assert find(matrix("others-environment"), "NetworkPolicy", "-env-guess-number")["spec"]["egress"] == [
        {"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}]}
    ]


def test_code_runs_in_a_sandbox():
    def runtime(name):
        return components(matrix(name))["environment"].spec.get("runtimeClassName")

    assert runtime("laptop") is None
    assert runtime("others-environment") == "gvisor"


def test_only_those_with_a_bucket_reach_cloud_storage():
    def reaches(name, component):
        policy = find(matrix(name), "NetworkPolicy", f"-{component}")
        return any(443 in [port["port"] for port in rule.get("ports", [])] for rule in policy["spec"]["egress"])

    assert {c: reaches("v5e-8", c) for c in ("trainer", "inference", "gateway", "env-calculator", "redis")} == {
        "trainer": True,
        "inference": True,
        "gateway": True,
        "env-calculator": False,
        "redis": False,
    }
    assert not reaches("laptop", "trainer")
