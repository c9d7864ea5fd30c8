"""Who may open a connection to whom, as the cluster's network plugin would decide it from the NetworkPolicies."""

from __future__ import annotations

from tests.k8s.rendering import Object, Pods, selected


def allowed(objects: list[Object], source: Pods, target: Pods, port: int) -> bool:
    """Whether a TCP connection between pods of one namespace passes the policies of both."""
    return _passes(objects, source, target, port, "Egress") and _passes(objects, target, source, port, "Ingress")


def _passes(objects: list[Object], pod: Pods, peer: Pods, port: int, direction: str) -> bool:
    """No policy for a pod allows all; several add up."""
    policies = [
        item["spec"]
        for item in objects
        if item["kind"] == "NetworkPolicy"
        and direction in item["spec"]["policyTypes"]
        and selected(item["spec"]["podSelector"].get("matchLabels", {}), pod.labels)
    ]
    if not policies:
        return True
    side = "to" if direction == "Egress" else "from"
    return any(_fits(rule, side, peer, port) for policy in policies for rule in policy.get(direction.lower()) or [])


def _fits(rule: Object, side: str, peer: Pods, port: int) -> bool:
    ports = rule.get("ports", [])
    right_port = not ports or any(p["port"] == port and p.get("protocol", "TCP") == "TCP" for p in ports)
    peers = rule.get(side, [])
    right_peer = not peers or any(
        "podSelector" in p
        and "namespaceSelector" not in p
        and selected(p["podSelector"].get("matchLabels", {}), peer.labels)
        for p in peers
    )
    return right_port and right_peer
