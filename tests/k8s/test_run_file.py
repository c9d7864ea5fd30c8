"""The run file that pods get is one that services take, and says what the user said."""

import pytest
import yaml

from headrace import config
from tests.k8s.rendering import MATRIX, VALUES, find, matrix, pods, render

VARIABLES = {"HEADRACE_REDIS_URL": "rediss://:secret@redis.example:6378/0"}


def run_files(name, tmp_path):
    """What each service loads, by component."""
    objects = matrix(name)
    data = find(objects, "ConfigMap", "-config" if name != "dressed" else "x-config")["data"]
    loaded = {}
    for item in pods(objects):
        for volume in item.spec.get("volumes", []):
            for entry in volume.get("configMap", {}).get("items", []):
                path = tmp_path / entry["path"]
                path.write_text(data[entry["key"]])
                loaded[item.labels["app.kubernetes.io/component"]] = config.load(path, variables=VARIABLES)
    return loaded


@pytest.mark.parametrize("name", MATRIX)
def test_services_take_the_run_file(name, tmp_path):
    loaded = run_files(name, tmp_path)
    assert {"trainer", "gateway"} <= loaded.keys()
    services = {item["metadata"]["name"]: item for item in matrix(name) if item["kind"] == "Service"}

    def check(address):
        if address.endswith(".example:50051") or address.endswith(".example:30000"):
            return
        host, port = address.removesuffix("/0").rsplit(":", 1)
        service, namespace, svc = host.split(".")
        assert (namespace, svc) == ("rl", "svc")
        assert int(port) in [entry["port"] for entry in services[service]["spec"]["ports"]]

    for component, run in loaded.items():
        assert run.run.id == "run"
        assert str(run.run.directory) == "/var/lib/headrace"
        for address in [run.trainer.address, *run.inference.addresses, *(e.address for e in run.environments.values())]:
            assert address
            check(address)
        if component in ("environment", "inference"):
            assert run.redis.url == ""
        elif not run.redis.url.startswith("rediss://:secret@"):
            check(run.redis.url.removeprefix("redis://"))


@pytest.mark.parametrize("values", [path.stem for path in sorted(VALUES.glob("*.yaml"))])
def test_the_chart_changes_nothing_that_the_user_set(values, tmp_path):
    given = config.parse(yaml.safe_load((VALUES / f"{values}.yaml").read_text())["config"])
    path = tmp_path / "run.yaml"
    path.write_text(find(render(values), "ConfigMap", "-config")["data"]["run.yaml"])
    made = config.load(path, variables=VARIABLES)
    owned = {
        "run": ["id", "directory"],
        "trainer": ["address"],
        "inference": ["addresses", "compilation_cache"],
        "redis": ["url"],
    }
    for name in config.Config.model_fields:
        if name == "environments":
            sections = [(given.environments[key], made.environments[key], ["address"]) for key in made.environments]
        else:
            sections = [(getattr(given, name), getattr(made, name), owned.get(name, []))]
        for before, after, keys in sections:
            assert before.model_dump(exclude=set(keys)) == after.model_dump(exclude=set(keys))


def test_large_numbers_stay_numbers():
    text = find(matrix("v5p-multi-host"), "ConfigMap", "-config")["data"]["run.yaml"]
    assert yaml.safe_load(text)["trainer"]["checkpoint"]["max_unacknowledged_bytes"] == 1073741824


def test_pods_roll_when_the_run_file_changes():
    def checksum(*sets):
        template = find(render("laptop", *sets), "Deployment", "-gateway")["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/config"]

    assert checksum() != checksum("config.trainer.steps=7")
    assert checksum() == checksum("gateway.replicas=7")


@pytest.mark.parametrize("name", MATRIX)
def test_helm_3_renders_the_same(name):
    def sort(objects):
        return sorted(objects, key=lambda item: (item["kind"], item["metadata"]["name"]))

    assert sort(matrix(name, program="helm3")) == sort(matrix(name))
