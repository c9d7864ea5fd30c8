"""The script of `helm test` against real servers."""

import asyncio
import subprocess
import sys

import pytest

from headrace import rpc, security
from headrace.v1 import rollout_service_pb2 as pb
from headrace.v1 import rollout_service_pb2_grpc, trajectory_pb2
from tests.certificates import Authority, token_file
from tests.k8s.rendering import CHART, ROOT, find, matrix

NAME = pb.DESCRIPTOR.services_by_name["RolloutService"].full_name


class Gateway(rollout_service_pb2_grpc.RolloutServiceServicer):
    def __init__(self, status):
        self.status, self.tasks = status, []

    async def RunEpisodes(self, request, context):
        self.tasks += request.tasks
        for task in request.tasks:
            yield pb.RunEpisodesResponse(task=task, trajectory=trajectory_pb2.Trajectory(status=self.status))


async def start(status, secured=security.PLAIN):
    gateway = Gateway(status)
    add = rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server
    return gateway, await rpc.Server.start("127.0.0.1:0", [(NAME, add, gateway)], security=secured)


async def check(*arguments):
    """(exit status, output) of the script."""
    command = [sys.executable, str(CHART / "files" / "check.py"), "--timeout-s", "3", *arguments]
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={"PYTHONPATH": "."},
    )
    return done.returncode, done.stdout + done.stderr


async def test_health_waits_for_serving_and_names_who_is_not():
    _, ready = await start(trajectory_pb2.EPISODE_STATUS_COMPLETED)
    _, waiting = await start(trajectory_pb2.EPISODE_STATUS_COMPLETED)
    await ready.set_serving(True)
    addresses = [f"127.0.0.1:{server.port}" for server in (ready, waiting)]
    assert await check("health", addresses[0]) == (0, f"{addresses[0]}: SERVING\n")
    status, output = await check("health", *addresses)
    assert status == 1
    assert f"{addresses[1]}: NOT_SERVING" in output
    await ready.stop(0)
    await waiting.stop(0)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (trajectory_pb2.EPISODE_STATUS_COMPLETED, 0),
        (trajectory_pb2.EPISODE_STATUS_TRUNCATED_TOKENS, 0),
        (trajectory_pb2.EPISODE_STATUS_ENGINE_ERROR, 1),
    ],
)
async def test_an_episode_counts_unless_it_failed(status, expected):
    gateway, server = await start(status)
    found, output = await check("episode", f"127.0.0.1:{server.port}", "guess_number")
    assert (found, [task.environment for task in gateway.tasks]) == (expected, ["guess_number"])
    assert trajectory_pb2.EpisodeStatus.Name(status) in output
    await server.stop(0)


async def test_over_tls_it_shows_and_checks_certificates_and_brings_the_token(tmp_path):
    files, token = Authority(tmp_path).issue("service"), token_file(tmp_path)
    secured = security.read(files.tls(client_certificates=True), token)
    _, server = await start(trajectory_pb2.EPISODE_STATUS_COMPLETED, secured)
    await server.set_serving(True)
    address = f"127.0.0.1:{server.port}"
    tls = [f"--authority={files.authority}", f"--certificate={files.certificate}", f"--key={files.key}"]
    assert await check("health", address, *tls) == (0, f"{address}: SERVING\n")
    assert (await check("episode", address, "e", *tls, f"--token-file={token}"))[0] == 0
    status, output = await check("episode", address, "e", *tls)
    assert status == 1
    assert "UNAUTHENTICATED: this server asks for a token" in output
    assert (await check("health", address))[0] == 1
    await server.stop(0)


async def test_a_gateway_that_is_not_there_is_named():
    status, output = await check("episode", "127.0.0.1:1", "guess_number")
    assert status == 1
    assert "127.0.0.1:1: " in output


def test_the_hooks_call_the_script_on_the_releases_services():
    objects = matrix("laptop")
    hosts = {item["metadata"]["name"] + ".rl.svc:50051" for item in objects if item["kind"] == "Service"}
    health = find(objects, "Pod", "-test-health")["spec"]["containers"][0]["args"]
    assert health[0] == "health"
    assert set(health[1:]) == {host for host in hosts if "inference" not in host and "redis" not in host}
    command, gateway, environment = find(objects, "Pod", "-test-episode")["spec"]["containers"][0]["args"]
    assert (command, environment) == ("episode", "guess_number")
    assert gateway in hosts
    assert (
        find(objects, "ConfigMap", "-test")["data"]["check.py"].strip()
        == (CHART / "files/check.py").read_text().strip()
    )
