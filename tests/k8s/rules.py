"""What a set of objects must satisfy beyond their schemas. Each rule yields a line for each fault.

The first ten are faults that an API server refuses, or a controller stumbles over, and that no schema shows; the rest
compares objects with each other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from tests.k8s.rendering import Object, Pods, pods, selected

Rule = Callable[[list[Object]], Iterator[str]]

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_SCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
_OWN_SECRETS = {
    ("environment", "tls"),
    ("environment", "environment-tokens"),
    ("inference", "tls"),
    ("inference", "token"),
}
_LWS_VARIABLES = {"LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE"}


def selectors_match_their_templates(objects: list[Object]) -> Iterator[str]:
    for item in pods(objects):
        selector = item.owner["spec"].get("selector", {}).get("matchLabels", {})
        if not selected(selector, item.labels):
            yield f"{item.name}: selector {selector} does not fit its pods"


def scalers_are_in_order(objects: list[Object]) -> Iterator[str]:
    for item in objects:
        spec = item.get("spec", {})
        if item["kind"] == "HorizontalPodAutoscaler" and spec.get("minReplicas", 1) > spec["maxReplicas"]:
            yield f"{_name(item)}: minimum above maximum"
        if item["kind"] == "HorizontalPodAutoscaler" and spec.get("minReplicas", 1) < 1:
            yield f"{_name(item)}: an HPA has at least one replica"
        if item["kind"] == "ScaledObject" and spec["minReplicaCount"] > spec["maxReplicaCount"]:
            yield f"{_name(item)}: minimum above maximum"


def mounts_have_volumes(objects: list[Object]) -> Iterator[str]:
    for item in pods(objects):
        claims = [claim["metadata"]["name"] for claim in item.owner["spec"].get("volumeClaimTemplates", [])]
        volumes = Counter([volume["name"] for volume in item.spec.get("volumes", [])] + claims)
        yield from (f"{item.name}: two volumes are named {name}" for name, count in volumes.items() if count > 1)
        mounted = set()
        for container in _containers(item):
            mounts = container.get("volumeMounts", [])
            mounted |= {mount["name"] for mount in mounts}
            paths = Counter(mount["mountPath"] for mount in mounts)
            yield from (f"{item.name}: two mounts at {path}" for path, count in paths.items() if count > 1)
        yield from (f"{item.name}: no volume {name} to mount" for name in mounted - volumes.keys())
        yield from (f"{item.name}: volume {name} is not mounted" for name in volumes.keys() - mounted)


def labels_are_valid(objects: list[Object]) -> Iterator[str]:
    shapes = [(_name(item), item["metadata"].get("labels", {})) for item in objects]
    shapes += [(item.name, item.labels) for item in pods(objects)]
    for name, labels in shapes:
        for key, value in labels.items():
            if not (_LABEL_KEY.fullmatch(key) and isinstance(value, str) and _LABEL_VALUE.fullmatch(value)):
                yield f"{name}: label {key}={value!r}"


def disruption_budgets_say_one_thing(objects: list[Object]) -> Iterator[str]:
    for item in _of(objects, "PodDisruptionBudget"):
        if len({"minAvailable", "maxUnavailable"} & item["spec"].keys()) != 1:
            yield f"{_name(item)}: set one of minAvailable and maxUnavailable"


def service_ports_are_told_apart(objects: list[Object]) -> Iterator[str]:
    for item in _of(objects, "Service"):
        ports = item["spec"]["ports"]
        names = [port.get("name", "") for port in ports]
        if (len(ports) > 1 and "" in names) or len(set(names)) < len(names):
            yield f"{_name(item)}: port names {names}"
        if len({port["port"] for port in ports}) < len(ports):
            yield f"{_name(item)}: a port twice"
    for item in pods(objects):
        for container in _containers(item):
            names = [port["name"] for port in container.get("ports", [])]
            if len(set(names)) < len(names) or any(len(name) > 15 for name in names):
                yield f"{item.name}: container port names {names}"


def names_are_dns_labels(objects: list[Object]) -> Iterator[str]:
    for item in objects:
        if not _DNS_LABEL.fullmatch(item["metadata"]["name"]):
            yield f"{_name(item)}: no DNS label"
        if item["kind"] == "StatefulSet" and len(item["metadata"]["name"]) > 52:
            yield f"{_name(item)}: its pods' revision label is too long"
    twice = Counter((item["kind"], item["metadata"]["name"]) for item in objects)
    yield from (f"{kind}/{name}: exists twice" for (kind, name), count in twice.items() if count > 1)


def pauses_fit_into_the_grace_period(objects: list[Object]) -> Iterator[str]:
    for item in pods(objects):
        for container in _containers(item):
            pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            if pause >= item.spec.get("terminationGracePeriodSeconds", 30):
                yield f"{item.name}: preStop pause of {pause} s takes the whole grace period"


def tpu_chips_are_requested_as_limited(objects: list[Object]) -> Iterator[str]:
    for item in pods(objects):
        for container in _containers(item):
            resources = container.get("resources", {})
            asked, limit = (resources.get(part, {}).get("google.com/tpu") for part in ("requests", "limits"))
            if asked != limit:
                yield f"{item.name}: requests {asked} chips, is limited to {limit}"
        selector = item.spec.get("nodeSelector", {})
        labels = {"cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"}
        if len(labels & selector.keys()) == 1:
            yield f"{item.name}: accelerator and topology go together"


def scale_targets_exist(objects: list[Object]) -> Iterator[str]:
    taken = set()
    for item in (item for item in objects if item["kind"] in _SCALERS):
        target = item["spec"]["scaleTargetRef"]
        key = (target["kind"], target["name"])
        found = [other for other in objects if (other["kind"], other["metadata"]["name"]) == key]
        if not found or found[0]["apiVersion"] != target["apiVersion"]:
            yield f"{_name(item)}: no {target}"
        elif "replicas" in found[0]["spec"]:
            yield f"{_name(item)}: its target fixes replicas"
        if key in taken:
            yield f"{_name(item)}: its target has another scaler"
        taken.add(key)


def services_reach_ports_of_pods(objects: list[Object]) -> Iterator[str]:
    for item in _of(objects, "Service"):
        chosen = [pod for pod in pods(objects) if selected(item["spec"]["selector"], pod.labels)]
        if not chosen:
            yield f"{_name(item)}: selects no pod"
        for pod in chosen:
            names = {port["name"] for container in _containers(pod) for port in container.get("ports", [])}
            for port in item["spec"]["ports"]:
                if port["targetPort"] not in names:
                    yield f"{_name(item)}: {pod.name} has no port {port['targetPort']}"


def probes_ask_ports_of_their_container(objects: list[Object]) -> Iterator[str]:
    for item in pods(objects):
        for container in _containers(item):
            known = {port["name"] for port in container.get("ports", [])}
            known |= {port["containerPort"] for port in container.get("ports", [])}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                action = container.get(probe, {})
                for kind in ("grpc", "httpGet", "tcpSocket"):
                    if kind in action and action[kind]["port"] not in known:
                        yield f"{item.name}: {probe} asks port {action[kind]['port']}"


def listeners_are_container_ports(objects: list[Object]) -> Iterator[str]:
    for item in pods(objects):
        for container in _containers(item):
            ports = {port["containerPort"] for port in container.get("ports", [])}
            for argument in container.get("args", []):
                match = re.fullmatch(r"--([a-z]+-)?listen=0\.0\.0\.0:(\d+)", argument)
                if match and int(match.group(2)) not in ports:
                    yield f"{item.name}: {argument} is no container port"


def variables_are_defined_before_use(objects: list[Object]) -> Iterator[str]:
    for item in pods(objects):
        for container in _containers(item):
            names = [variable["name"] for variable in container.get("env", [])]
            if len(set(names)) < len(names):
                yield f"{item.name}: a variable twice in {names}"
            injected = _LWS_VARIABLES if item.owner["kind"] == "LeaderWorkerSet" else set()
            texts = [(argument, set(names)) for argument in container.get("args", []) + container.get("command", [])]
            texts += [
                (variable.get("value", ""), set(names[:index]))
                for index, variable in enumerate(container.get("env", []))
            ]
            for text, defined in texts:
                for name in re.findall(r"\$\(([A-Za-z_]\w*)\)", text):
                    if name not in defined | injected:
                        yield f"{item.name}: $({name}) is not defined"


def references_exist(objects: list[Object]) -> Iterator[str]:
    """ConfigMaps, their keys and ServiceAccounts; Secrets and claims come from outside, see external_references."""
    maps = {item["metadata"]["name"]: item.get("data", {}) for item in _of(objects, "ConfigMap")}
    accounts = {item["metadata"]["name"] for item in _of(objects, "ServiceAccount")}
    for item in pods(objects):
        account = item.spec.get("serviceAccountName")
        if account is not None and account not in accounts:
            yield f"{item.name}: no ServiceAccount {account}"
        for volume in item.spec.get("volumes", []):
            source = volume.get("configMap")
            if source is None:
                continue
            if source["name"] not in maps:
                yield f"{item.name}: no ConfigMap {source['name']}"
                continue
            for entry in source.get("items", []):
                if entry["key"] not in maps[source["name"]]:
                    yield f"{item.name}: ConfigMap {source['name']} has no {entry['key']}"
    services = {item["metadata"]["name"] for item in _of(objects, "Service")}
    for item in _of(objects, "StatefulSet"):
        if item["spec"]["serviceName"] not in services:
            yield f"{_name(item)}: no Service {item['spec']['serviceName']}"
    logins = {item["metadata"]["name"] for item in _of(objects, "TriggerAuthentication")}
    for item in _of(objects, "ScaledObject"):
        for trigger in item["spec"]["triggers"]:
            name = trigger.get("authenticationRef", {}).get("name")
            if name is not None and name not in logins:
                yield f"{_name(item)}: no TriggerAuthentication {name}"


def selectors_find_pods(objects: list[Object]) -> Iterator[str]:
    """Budgets, policies and monitors each mean some pod; a monitor's port is one of its pods'."""
    for item in objects:
        spec = item.get("spec", {})
        if item["kind"] == "NetworkPolicy":
            selector = spec["podSelector"].get("matchLabels", {})
        elif item["kind"] in ("PodDisruptionBudget", "PodMonitoring"):
            selector = spec["selector"]["matchLabels"]
        else:
            continue
        chosen = [pod for pod in pods(objects) if selected(selector, pod.labels)]
        if not chosen:
            yield f"{_name(item)}: selects no pod"
        for endpoint in spec.get("endpoints", []):
            for pod in chosen:
                if endpoint["port"] not in _port_names(pod):
                    yield f"{_name(item)}: {pod.name} has no port {endpoint['port']}"
    for item in _of(objects, "ServiceMonitor"):
        selector = item["spec"]["selector"]["matchLabels"]
        chosen_services = [
            service for service in _of(objects, "Service") if selected(selector, service["metadata"]["labels"])
        ]
        if not chosen_services:
            yield f"{_name(item)}: selects no Service"
        for service in chosen_services:
            names = {port["name"] for port in service["spec"]["ports"]}
            yield from (
                f"{_name(item)}: {_name(service)} has no port {endpoint['port']}"
                for endpoint in item["spec"]["endpoints"]
                if endpoint["port"] not in names
            )


def pods_are_restricted(objects: list[Object]) -> Iterator[str]:
    """The restricted Pod Security standard, a read-only root, and no access to the Kubernetes API."""
    for item in pods(objects):
        security = item.spec.get("securityContext", {})
        if not security.get("runAsNonRoot") or security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{item.name}: pod security {security}"
        if item.spec.get("automountServiceAccountToken", True) or item.spec.get("enableServiceLinks", True):
            yield f"{item.name}: knows the cluster"
        if {"hostNetwork", "hostPID", "hostIPC"} & item.spec.keys():
            yield f"{item.name}: shares the host's namespaces"
        for volume in item.spec.get("volumes", []):
            if "hostPath" in volume:
                yield f"{item.name}: mounts the host"
        for container in _containers(item):
            context = container.get("securityContext", {})
            wanted = {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            if any(context.get(key) != value for key, value in wanted.items()) or context.get("privileged"):
                yield f"{item.name}: container security {context}"


def containers_have_resources_and_pinned_images(objects: list[Object]) -> Iterator[str]:
    for item in pods(objects):
        for container in _containers(item):
            resources = container.get("resources", {})
            if not {"cpu", "memory"} <= resources.get("requests", {}).keys() or "memory" not in resources.get(
                "limits", {}
            ):
                yield f"{item.name}: resources {resources}"
            if not re.search(r"(@sha256:[0-9a-f]{64}|:[\w][\w.-]*)$", container["image"]) or container[
                "image"
            ].endswith(":latest"):
                yield f"{item.name}: image {container['image']} is not pinned"


def environments_are_locked_in(objects: list[Object]) -> Iterator[str]:
    """No secret but its own certificate and token, and no address of Redis; the same for an engine and Redis."""
    shared = {
        volume["secret"]["secretName"]
        for item in pods(objects)
        if item.labels.get("app.kubernetes.io/component") in ("trainer", "redis")
        for volume in item.spec.get("volumes", [])
        if "secret" in volume
    }
    for item in pods(objects):
        component = item.labels.get("app.kubernetes.io/component")
        if component not in ("environment", "inference"):
            continue
        for container in _containers(item):
            for variable in container.get("env", []):
                if "secretKeyRef" in variable.get("valueFrom", {}):
                    yield f"{item.name}: holds the secret {variable['name']}"
        for volume in item.spec["volumes"]:
            secret = volume.get("secret", {})
            if "secret" in volume and (component, volume["name"]) not in _OWN_SECRETS:
                yield f"{item.name}: holds the secret {volume['name']}"
            if component == "environment" and secret.get("secretName") in shared:
                yield f"{item.name}: holds a secret of the trainer's or of Redis"
            if component == "environment" and volume["name"] == "environment-tokens":
                names = [entry["key"].lower().replace("_", "-") for entry in secret.get("items", [])]
                if names != [item.labels["headrace/environment"]]:
                    yield f"{item.name}: holds the tokens of {names}"
            entries = volume.get("configMap", {}).get("items", [])
            if any(entry["key"] == "run.yaml" for entry in entries):
                yield f"{item.name}: is told where Redis is"


def _of(objects: list[Object], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


def _name(item: Object) -> str:
    return f"{item['kind']}/{item['metadata']['name']}"


def _containers(item: Pods) -> list[Object]:
    return [*item.spec.get("initContainers", []), *item.spec["containers"]]


def _port_names(item: Pods) -> set[str]:
    return {port["name"] for container in _containers(item) for port in container.get("ports", [])}


ALL: tuple[Rule, ...] = (
    selectors_match_their_templates,
    scalers_are_in_order,
    mounts_have_volumes,
    labels_are_valid,
    disruption_budgets_say_one_thing,
    service_ports_are_told_apart,
    names_are_dns_labels,
    pauses_fit_into_the_grace_period,
    tpu_chips_are_requested_as_limited,
    scale_targets_exist,
    services_reach_ports_of_pods,
    probes_ask_ports_of_their_container,
    listeners_are_container_ports,
    variables_are_defined_before_use,
    references_exist,
    selectors_find_pods,
    pods_are_restricted,
    containers_have_resources_and_pinned_images,
    environments_are_locked_in,
)
