"""Every render satisfies every rule, and every rule sees the fault it is there for."""

import pytest

from tests.k8s import rules
from tests.k8s.rendering import MATRIX, find, matrix, pods


@pytest.mark.parametrize("name", MATRIX)
def test_renders_satisfy_the_rules(name):
    objects = matrix(name)
    assert [line for rule in rules.ALL for line in rule(objects)] == []


def container(objects, component):
    item = next(item for item in pods(objects) if item.labels["app.kubernetes.io/component"] == component)
    return item.spec["containers"][0]


def pod(objects, component):
    return next(item for item in pods(objects) if item.labels["app.kubernetes.io/component"] == component).spec


def wrong_selector(objects):
    find(objects, "Deployment", "-gateway")["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] = "x"


def wrong_bounds_of_an_hpa(objects):
    find(objects, "HorizontalPodAutoscaler", "-gateway")["spec"]["minReplicas"] = 99


def wrong_bounds_of_a_scaled_object(objects):
    find(objects, "ScaledObject", "-gateway")["spec"]["minReplicaCount"] = 99


def mount_without_volume(objects):
    container(objects, "trainer")["volumeMounts"].append({"name": "absent", "mountPath": "/absent"})


def volume_without_mount(objects):
    pod(objects, "trainer")["volumes"].append({"name": "spare", "emptyDir": {}})


def bad_label_value(objects):
    find(objects, "Service", "-gateway")["metadata"]["labels"]["run"] = "a b"


def two_budgets(objects):
    find(objects, "PodDisruptionBudget", "-gateway")["spec"]["minAvailable"] = 1


def unnamed_port(objects):
    del find(objects, "Service", "-gateway")["spec"]["ports"][0]["name"]


def same_port_twice(objects):
    ports = find(objects, "Service", "-gateway")["spec"]["ports"]
    ports[1]["port"] = ports[0]["port"]


def bad_name(objects):
    find(objects, "Service", "-gateway")["metadata"]["name"] = "run_headrace"


def same_name_twice(objects):
    objects.append(find(objects, "Service", "-gateway"))


def long_pause(objects):
    container(objects, "gateway")["lifecycle"]["preStop"]["sleep"]["seconds"] = 61


def more_chips_than_allowed(objects):
    container(objects, "trainer")["resources"]["requests"]["google.com/tpu"] = "8"


def topology_without_accelerator(objects):
    del pod(objects, "trainer")["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"]


def absent_scale_target(objects):
    find(objects, "ScaledObject", "-gateway")["spec"]["scaleTargetRef"]["name"] = "absent"


def fixed_replicas(objects):
    find(objects, "Deployment", "-gateway")["spec"]["replicas"] = 1


def two_scalers(objects):
    scaler = find(objects, "ScaledObject", "-gateway")
    objects.append({**scaler, "metadata": {"name": "second"}})


def service_of_nobody(objects):
    find(objects, "Service", "-gateway")["spec"]["selector"]["app.kubernetes.io/component"] = "x"


def service_to_no_port(objects):
    find(objects, "Service", "-gateway")["spec"]["ports"][0]["targetPort"] = "http"


def probe_of_no_port(objects):
    container(objects, "gateway")["readinessProbe"]["grpc"]["port"] = 50099


def listener_on_no_port(objects):
    container(objects, "gateway")["args"][1] = "--listen=0.0.0.0:50099"


def undefined_variable(objects):
    container(objects, "gateway")["args"].append("--x=$(ABSENT)")


def variable_used_before_it_is_defined(objects):
    container(objects, "gateway")["env"].reverse()


def absent_config_map(objects):
    objects.remove(find(objects, "ConfigMap", "-config"))


def absent_key(objects):
    del find(objects, "ConfigMap", "-config")["data"]["run.yaml"]


def absent_service_account(objects):
    objects.remove(find(objects, "ServiceAccount", "-gateway"))


def absent_login(objects):
    objects.remove(find(objects, "TriggerAuthentication", "-gateway"))


def policy_for_nobody(objects):
    find(objects, "NetworkPolicy", "-gateway")["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] = (
        "x"
    )


def monitor_of_no_port(objects):
    find(objects, "PodMonitoring", "-gateway")["spec"]["endpoints"][0]["port"] = "http"


def service_monitor_of_no_port(objects):
    find(objects, "ServiceMonitor", "-gateway")["spec"]["endpoints"][0]["port"] = "http"


def root_user(objects):
    pod(objects, "test")["securityContext"]["runAsNonRoot"] = False


def writable_root(objects):
    del container(objects, "environment")["securityContext"]["readOnlyRootFilesystem"]


def token_in_an_environment(objects):
    pod(objects, "environment")["automountServiceAccountToken"] = True


def latest_image(objects):
    container(objects, "gateway")["image"] = "headrace-rollout:latest"


def no_memory_limit(objects):
    del container(objects, "gateway")["resources"]["limits"]["memory"]


def secret_in_an_environment(objects):
    env = container(objects, "gateway")["env"]
    container(objects, "environment")["env"] = env


def tokens_of_all_in_an_environment(objects):
    del volume_of_an_environment(objects, "environment-tokens")["secret"]["items"]


def certificate_of_the_trainer_in_an_environment(objects):
    volume_of_an_environment(objects, "tls")["secret"]["secretName"] = "certificates"


def volume_of_an_environment(objects, name):
    volumes = find(objects, "Deployment", "-env-guess-number")["spec"]["template"]["spec"]["volumes"]
    return next(volume for volume in volumes if volume["name"] == name)


def health_at_no_port(objects):
    ports = find(objects, "Deployment", "-gateway")["spec"]["template"]["spec"]["containers"][0]["ports"]
    ports.remove({"name": "health", "containerPort": 50052})


def bus_in_an_environment(objects):
    pod(objects, "environment")["volumes"][0]["configMap"]["items"][0]["key"] = "run.yaml"


@pytest.mark.parametrize(
    ("render", "rule", "mutate"),
    [
        ("laptop", rules.selectors_match_their_templates, wrong_selector),
        ("hpa", rules.scalers_are_in_order, wrong_bounds_of_an_hpa),
        ("v6e-8", rules.scalers_are_in_order, wrong_bounds_of_a_scaled_object),
        ("laptop", rules.mounts_have_volumes, mount_without_volume),
        ("laptop", rules.mounts_have_volumes, volume_without_mount),
        ("laptop", rules.labels_are_valid, bad_label_value),
        ("laptop", rules.disruption_budgets_say_one_thing, two_budgets),
        ("laptop", rules.service_ports_are_told_apart, unnamed_port),
        ("laptop", rules.service_ports_are_told_apart, same_port_twice),
        ("laptop", rules.names_are_dns_labels, bad_name),
        ("laptop", rules.names_are_dns_labels, same_name_twice),
        ("laptop", rules.pauses_fit_into_the_grace_period, long_pause),
        ("v5p-multi-host", rules.tpu_chips_are_requested_as_limited, more_chips_than_allowed),
        ("v5e-8", rules.tpu_chips_are_requested_as_limited, topology_without_accelerator),
        ("v6e-8", rules.scale_targets_exist, absent_scale_target),
        ("v6e-8", rules.scale_targets_exist, fixed_replicas),
        ("v6e-8", rules.scale_targets_exist, two_scalers),
        ("laptop", rules.services_reach_ports_of_pods, service_of_nobody),
        ("laptop", rules.services_reach_ports_of_pods, service_to_no_port),
        ("laptop", rules.probes_ask_ports_of_their_container, probe_of_no_port),
        ("laptop", rules.listeners_are_container_ports, listener_on_no_port),
        ("laptop", rules.variables_are_defined_before_use, undefined_variable),
        ("keda-with-password", rules.variables_are_defined_before_use, variable_used_before_it_is_defined),
        ("laptop", rules.references_exist, absent_config_map),
        ("laptop", rules.references_exist, absent_key),
        ("laptop", rules.references_exist, absent_service_account),
        ("keda-with-password", rules.references_exist, absent_login),
        ("laptop", rules.selectors_find_pods, policy_for_nobody),
        ("v5e-8", rules.selectors_find_pods, monitor_of_no_port),
        ("hpa", rules.selectors_find_pods, service_monitor_of_no_port),
        ("laptop", rules.pods_are_restricted, root_user),
        ("laptop", rules.pods_are_restricted, writable_root),
        ("laptop", rules.pods_are_restricted, token_in_an_environment),
        ("laptop", rules.containers_have_resources_and_pinned_images, latest_image),
        ("laptop", rules.containers_have_resources_and_pinned_images, no_memory_limit),
        ("others-redis", rules.environments_are_locked_in, secret_in_an_environment),
        ("laptop", rules.environments_are_locked_in, bus_in_an_environment),
        ("secured", rules.environments_are_locked_in, tokens_of_all_in_an_environment),
        ("secured", rules.environments_are_locked_in, certificate_of_the_trainer_in_an_environment),
        ("laptop", rules.listeners_are_container_ports, health_at_no_port),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_rule_sees_its_fault(render, rule, mutate):
    objects = matrix(render)
    mutate(objects)
    assert list(rule(objects)) != []
