"""Network policies let through what the services need, and nothing else."""

import itertools

import pytest

from tests.k8s.network import allowed
from tests.k8s.rendering import find, matrix, pods

GRPC, HEALTH, BULK, HTTP, REDIS, METRICS = 50051, 50052, 50053, 30000, 6379, 9090
NEEDED = {
    ("trainer", "redis", REDIS),
    ("gateway", "redis", REDIS),
    ("gateway", "environment", GRPC),
    ("gateway", "inference", HTTP),
    ("inference", "trainer", GRPC),
    ("inference", "trainer", BULK),
    ("test", "trainer", GRPC),
    ("test", "gateway", GRPC),
    ("test", "environment", GRPC),
    ("test", "inference", HTTP),
}


def components(objects):
    return {item.labels["app.kubernetes.io/component"]: item for item in pods(objects)}


# Under TLS nothing travels beside it.
NEEDED_UNDER_TLS = NEEDED - {("inference", "trainer", BULK)}


@pytest.mark.parametrize(
    ("name", "needed"),
    [("laptop", NEEDED), ("v5e-8", NEEDED), ("keda-with-password", NEEDED), ("secured", NEEDED_UNDER_TLS)],
)
def test_exactly_the_needed_connections_pass(name, needed):
    objects = matrix(name)
    found = components(objects)
    passing = {
        (source, target, port)
        for source, target in itertools.permutations(found, 2)
        for port in (GRPC, HEALTH, BULK, HTTP, REDIS, METRICS)
        if allowed(objects, found[source], found[target], port)
    }
    assert passing == needed


@pytest.mark.parametrize(("name", "component"), [("v5p-multi-host", "trainer"), ("leader-worker-set", "inference")])
def test_hosts_of_a_slice_reach_each_other(name, component):
    objects = matrix(name)
    host = components(objects)[component]
    assert allowed(objects, host, host, 8471)
    other = matrix("laptop")
    assert not allowed(other, components(other)[component], components(other)[component], 8471)


@pytest.mark.parametrize(("name", "bulk"), [("laptop", True), ("secured", False)])
def test_engines_hand_weights_on_to_each_other(name, bulk):
    objects = matrix(name)
    engine = components(objects)["inference"]
    assert allowed(objects, engine, engine, GRPC)
    assert allowed(objects, engine, engine, BULK) is bulk
    assert not allowed(objects, engine, engine, HTTP)


def test_only_those_that_trace_reach_the_collector():
    def reaches(name, component):
        egress = find(matrix(name), "NetworkPolicy", f"-{component}")["spec"]["egress"]
        return any("observability" in str(rule) for rule in egress)

    for component in ("trainer", "gateway", "inference"):
        assert reaches("traced", component)
        assert not reaches("laptop", component)
    assert not reaches("traced", "env-guess-number")
    assert not reaches("traced", "redis")


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
