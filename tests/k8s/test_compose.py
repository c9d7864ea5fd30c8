"""compose.yaml without an engine: who shares a network, how containers are locked down, what they are told."""

import itertools

import yaml

from headrace import config
from tests.k8s.rendering import ROOT, matrix, pods
from tools import compose_run

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


def test_networks_join_only_those_who_talk():
    joined = {
        frozenset((one, two))
        for one, two in itertools.combinations(SERVICES, 2)
        if set(SERVICES[one]["networks"]) & set(SERVICES[two]["networks"])
    }
    assert joined == {
        frozenset(pair)
        for pair in (
            ("redis", "trainer"),
            ("redis", "gateway"),
            ("trainer", "gateway"),  # both on the bus
            ("trainer", "inference"),
            ("gateway", "inference"),
            ("gateway", "environment"),
        )
    }
    assert all(network == {"internal": True} for network in COMPOSE["networks"].values())


def test_containers_are_locked_down():
    for name, service in SERVICES.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["mem_limit"] and service["pids_limit"] and "healthcheck" in service, name
        assert service["user"].split(":")[0] not in ("0", "root"), name


def test_programs_get_the_arguments_that_the_chart_gives():
    def flags(words):
        return {word.split("=")[0] for word in words}

    for item in pods(matrix("laptop")):
        component = item.labels["app.kubernetes.io/component"]
        if component not in ("redis", "test"):
            # A container may exit when the run has ended: nothing starts it again, and the demo waits for it. There is
            # no kubelet that probes, and one engine has no peers.
            elsewhere = {"--drain-timeout-s", "--stay", "--health-listen", "--weights-listen", "--bulk-listen"}
            told = flags(item.spec["containers"][0]["args"]) - elsewhere
            assert flags(SERVICES[component]["command"]) == told, component


def test_the_run_file_names_the_containers(tmp_path):
    run = compose_run.for_containers(config.load(ROOT / "configs" / "guess_number.yaml"))
    addresses = [run.trainer.address, *run.inference.addresses, run.redis.place.removeprefix("redis://")[:-2]]
    addresses += [environment.address for environment in run.environments.values()]
    assert {address.split(":")[0] for address in addresses} == {"redis", "trainer", "inference", "environment"}
    for address in addresses:
        host, port = address.split(":")
        listeners = (
            [word for word in SERVICES[host]["command"] if word.startswith("--listen")] if host != "redis" else []
        )
        assert all(word.endswith(f":{port}") for word in listeners)
