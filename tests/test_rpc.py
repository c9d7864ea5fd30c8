"""headrace.rpc: health, reflection, taken ports, graceful stop, exit codes."""

import asyncio
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace import rpc
from headrace.v1 import environment_service_pb2 as pb
from headrace.v1 import environment_service_pb2_grpc as pb_grpc

NAME = pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name


class Slow(pb_grpc.EnvironmentServiceServicer):
    def __init__(self):
        self.entered, self.proceed = asyncio.Event(), asyncio.Event()

    async def ListEnvironments(self, request, context):
        self.entered.set()
        await self.proceed.wait()
        return pb.ListEnvironmentsResponse()


async def start(servicer):
    return await rpc.Server.start("127.0.0.1:0", [(NAME, pb_grpc.add_EnvironmentServiceServicer_to_server, servicer)])


async def test_health_follows_set_serving():
    server = await start(Slow())
    async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for serving, expected in ((False, "NOT_SERVING"), (True, "SERVING")):
            await server.set_serving(serving)
            for name in ("", NAME):
                reply = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
                assert health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status) == expected
    await server.stop(0)


async def test_a_service_that_is_not_ready_is_alive():
    server = await start(Slow())
    async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
        request = health_pb2.HealthCheckRequest(service="liveness")
        reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    await server.stop(0)


async def test_reflection_lists_the_service():
    server = await start(Slow())
    async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5
        )
        names = [entry.name async for reply in call for entry in reply.list_services_response.service]
    assert NAME in names
    await server.stop(0)


async def test_a_taken_port_is_refused_in_one_line(capfd):
    server = await start(Slow())
    with pytest.raises(rpc.AddressInUse, match=r"--listen .* cannot be bound \(Address already in use\)"):
        await rpc.Server.start(f"127.0.0.1:{server.port}", [])
    assert capfd.readouterr().err == ""
    await server.stop(0)


@pytest.mark.parametrize(
    "listen", ["no.such.host.invalid:0", "127.0.0.1:http-nonsense", "192.0.2.1:0", "127.0.0.1", "127.0.0.1:99999"]
)
async def test_an_impossible_address_is_refused(listen):
    with pytest.raises(rpc.StartupError, match="--listen"):
        await rpc.Server.start(listen, [])


async def test_stop_lets_a_running_call_end():
    servicer = Slow()
    server = await start(servicer)
    async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
        call = asyncio.ensure_future(
            pb_grpc.EnvironmentServiceStub(channel).ListEnvironments(pb.ListEnvironmentsRequest(), timeout=30)
        )
        await servicer.entered.wait()
        stopping = asyncio.ensure_future(server.stop(30))
        servicer.proceed.set()
        assert await call == pb.ListEnvironmentsResponse()
        await stopping


async def test_stop_cancels_what_outlasts_the_grace():
    servicer = Slow()
    server = await start(servicer)
    async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
        call = pb_grpc.EnvironmentServiceStub(channel).ListEnvironments(pb.ListEnvironmentsRequest(), timeout=30)
        await servicer.entered.wait()
        await server.stop(0.1)
        with pytest.raises(grpc.aio.AioRpcError):
            await call


@pytest.mark.parametrize(
    ("body", "code", "stderr"),
    [
        ("raise StartupError('redis is away; start it')", 2, "error: redis is away; start it\n"),
        ("raise ExceptionGroup('g', [StartupError('a')])", 2, "error: a\n"),
        ("return 3", 3, ""),
        ("return None", 0, ""),
    ],
)
def test_main_turns_user_errors_into_a_line_and_code_2(body, code, stderr):
    imports = "from headrace import rpc\nfrom headrace.errors import StartupError\n"
    program = f"{imports}async def run():\n    {body}\nrpc.main(run)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, stderr)
