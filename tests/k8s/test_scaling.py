"""Autoscalers ask for what our services really export: metrics by their names, and the ticket lag of a real Redis."""

import re

import pytest
import redis.asyncio

from headrace.stream import Streams
from headrace.v1.trajectory_pb2 import Task, TrajectoryGroup
from tests.k8s.rendering import find, matrix
from tools import document_metrics


def asked(objects):
    """Names of our metrics in autoscalers."""
    scalers = [item for item in objects if item["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    assert scalers
    return {name for scaler in scalers for name in re.findall(r"headrace_[a-z_]+", str(scaler["spec"]))}


@pytest.mark.parametrize("name", ["hpa", "keda-with-password", "v6e-8", "leader-worker-set"])
def test_metrics_are_exported(name):
    known = {sample for family in document_metrics.families() for sample in family.samples}
    names = asked(matrix(name))
    assert names and names <= known


def test_names_follow_the_adapter():
    scaler = find(matrix("hpa"), "HorizontalPodAutoscaler", "-gateway")
    name = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert name == "prometheus.googleapis.com|headrace_rollout_running_episodes|gauge"


async def test_the_ticket_lag_is_what_no_gateway_has_claimed(redis_url):
    trigger = find(matrix("v6e-8"), "ScaledObject", "-gateway")["spec"]["triggers"][0]
    assert trigger["type"] == "redis-streams"
    stream, group = trigger["metadata"]["stream"], trigger["metadata"]["consumerGroup"]
    client = redis.asyncio.from_url(redis_url)
    await client.delete(stream, stream.replace(":tasks", ":state"), stream.replace(":tasks", ":groups"))
    # The run id of a release is its name.
    streams = Streams(client, "run", claim_timeout_s=30)
    await streams.open()

    async def lag():
        return next(item["lag"] for item in await client.xinfo_groups(stream) if item["name"] == group.encode())

    await streams.issue([Task(task_id=str(number)) for number in range(6)], first_sequence=0)
    assert await lag() == 6
    first, second = await streams.claim("gateway-0", 2, 1.0)
    assert await lag() == 4
    assert await streams.publish(first.ticket_id, TrajectoryGroup(task=first.task))
    await streams.release("gateway-0", [second.ticket_id])
    assert await lag() == 4
    await streams.claim("gateway-0", 4, 1.0)
    assert await lag() == 0
    await client.aclose()
