"""Secrets reach the pods that use them, at the paths that the run file names, and no other pod; probes pass TLS by."""

from __future__ import annotations

import pytest

from headrace import config
from tests.k8s.rendering import find, matrix, pods

SECURED = ("secured", "secured-slices")
VARIABLES = {"HEADRACE_REDIS_URL": "redis://h:1/0"}


def containers(name):
    """(component, environment, container, pod's spec) of our own services."""
    for item in pods(matrix(name)):
        component = item.labels["app.kubernetes.io/component"]
        if component != "redis":
            yield component, item.labels.get("headrace/environment"), item.spec["containers"][0], item.spec


def files(container, spec):
    """Paths of the files that Secrets put into a container, and which key of which Secret each is."""
    found = {}
    for mount in container["volumeMounts"]:
        volume = next((volume for volume in spec.get("volumes", []) if volume["name"] == mount["name"]), {})
        for entry in volume.get("secret", {}).get("items", []):
            found[f"{mount['mountPath']}/{entry['path']}"] = (volume["secret"]["secretName"], entry["key"])
    return found


def run_file(name, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(find(matrix(name), "ConfigMap", "-config")["data"]["run.yaml"])
    return config.load(path, variables=VARIABLES)


@pytest.mark.parametrize("name", SECURED)
def test_each_service_finds_the_files_that_its_run_file_names(name, tmp_path):
    run = run_file(name, tmp_path)
    tls = {str(run.security.tls.certificate), str(run.security.tls.key), str(run.security.tls.authority)}
    tokens = {key: str(entry.token_file) for key, entry in run.environments.items() if entry.token_file}
    seen = set()
    for component, environment, container, spec in containers(name):
        seen.add(component)
        there = files(container, spec).keys()
        assert tls <= there, component
        if component == "environment":
            own = {path for key, path in tokens.items() if key.replace("_", "-") == environment}
            assert {path for path in there if "token" in path} == own
        else:
            assert str(run.security.token_file) in there
        if component == "gateway":
            assert set(tokens.values()) <= there
    assert {"trainer", "gateway", "inference", "environment", "test"} <= seen


def test_an_environment_holds_nobody_elses_key():
    held = {
        (component, secret)
        for component, _, container, spec in containers("secured")
        for secret, _ in files(container, spec).values()
    }
    assert {secret for component, secret in held if component == "environment"} == {
        "environment-certificates",
        "environment-tokens",
    }
    assert ("inference", "environment-tokens") not in held
    assert ("trainer", "environment-tokens") not in held


@pytest.mark.parametrize("name", ["laptop", *SECURED])
def test_probes_pass_tls_by(name):
    """The kubelet's gRPC probes know no TLS; its HTTP probes do, and ask for no certificate."""
    for component, _, container, _ in containers(name):
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            action = container.get(probe, {})
            if "grpc" in action:
                assert action["grpc"]["port"] == 50052
                assert "--health-listen=0.0.0.0:50052" in container["args"]
            if "httpGet" in action:
                assert component == "inference"
                assert action["httpGet"]["scheme"] == ("HTTP" if name == "laptop" else "HTTPS")


def test_only_the_engine_is_scraped_over_tls():
    for kind, key in (("PodMonitoring", "tls"), ("ServiceMonitor", "tlsConfig")):
        for component in ("trainer", "gateway", "environment", "inference"):
            (endpoint,) = find(matrix("secured"), kind, f"-{component}")["spec"]["endpoints"]
            secured = {"scheme": "https", key: {"insecureSkipVerify": True}}
            assert (secured.items() <= endpoint.items()) == (component == "inference")


def test_redis_speaks_tls_alone_and_is_checked_by_its_authority():
    objects = matrix("secured")
    (redis,) = find(objects, "StatefulSet", "-redis")["spec"]["template"]["spec"]["containers"]
    assert {"--port=0", "--tls-port=6379"} <= set(redis["args"])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert "--tls --cacert /etc/headrace-tls/ca.crt" in redis[probe]["exec"]["command"][2]
    for component, _, container, spec in containers("secured"):
        if component not in ("trainer", "gateway"):
            continue
        url = next(entry["value"] for entry in container["env"] if entry["name"] == "HEADRACE_REDIS_URL")
        assert url.startswith("rediss://:$(HEADRACE_REDIS_PASSWORD)@run-headrace-redis.rl.svc:6379/0?ssl_ca_certs=")
        assert files(container, spec)[url.partition("=")[2]] == ("redis-certificates", "ca.crt")
    trigger = find(objects, "ScaledObject", "-gateway")["spec"]["triggers"][0]["metadata"]
    assert trigger["enableTLS"] == "true"
    login = find(objects, "TriggerAuthentication", "-gateway")["spec"]["secretTargetRef"]
    assert [entry["parameter"] for entry in login] == ["password", "ca"]


def test_keys_are_for_the_services_group_alone():
    for _, _, _, spec in containers("secured"):
        for volume in spec.get("volumes", []):
            if "secret" in volume and volume["name"] != "redis-ca":
                assert volume["secret"]["defaultMode"] == 0o440
