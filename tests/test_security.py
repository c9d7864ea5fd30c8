"""headrace.security over real gRPC servers: who gets in, who does not, and what each of them is told."""

import asyncio
import contextlib
import logging
import socket
import subprocess

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace import config, rpc, security
from headrace.errors import StartupError
from headrace.security import PLAIN, Security
from headrace.v1 import trainer_service_pb2 as pb
from headrace.v1 import trainer_service_pb2_grpc as pb_grpc
from tests import processes
from tests.certificates import TOKEN, Authority, Issued, token_file

NAME = pb.DESCRIPTOR.services_by_name["TrainerService"].full_name


class Trainer(pb_grpc.TrainerServiceServicer):
    async def GetTrainerStatus(self, request, context):
        return pb.GetTrainerStatusResponse(step=7)

    async def WatchWeights(self, request, context):
        yield pb.WatchWeightsResponse(policy_version=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder):
    return Authority(folder)


@pytest.fixture(scope="module")
def ours(authority, folder):
    """What a service of the run has."""
    return security.read(authority.issue("service").tls(), token_file(folder))


@contextlib.asynccontextmanager
async def serving(of: Security, **options):
    add = pb_grpc.add_TrainerServiceServicer_to_server
    server = await rpc.Server.start("127.0.0.1:0", [(NAME, add, Trainer())], security=of, **options)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


async def status(address, caller):
    async with rpc.channel(address, security=caller) as channel:
        return (
            await pb_grpc.TrainerServiceStub(channel).GetTrainerStatus(pb.GetTrainerStatusRequest(), timeout=20)
        ).step


async def refusal(address, caller):
    """(code, details) of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await status(address, caller)
    return caught.value.code(), caught.value.details()


async def test_who_has_the_authority_and_the_token_gets_in(ours):
    async with serving(ours) as address:
        assert await status(address, ours) == 7
        assert await security.diagnose(address, ours) == ""


async def test_a_stream_gets_in_and_is_refused_likewise(ours):
    async with serving(ours) as address, rpc.channel(address, security=ours) as channel:
        watch = pb_grpc.TrainerServiceStub(channel).WatchWeights(pb.WatchWeightsRequest(engine="e"), timeout=20)
        assert (await watch.read()).policy_version == 1
        async with rpc.channel(address, security=Security(ours.tls)) as stranger:
            watch = pb_grpc.TrainerServiceStub(stranger).WatchWeights(pb.WatchWeightsRequest(engine="e"), timeout=20)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await watch.read()
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("tokens", "words"), [((), "asks for a token"), (("another-token-of-ours",), "token is wrong")]
)
async def test_without_the_right_token_a_call_is_refused_in_words(ours, tokens, words):
    async with serving(ours) as address:
        code, details = await refusal(address, Security(ours.tls, tokens))
    assert code == grpc.StatusCode.UNAUTHENTICATED
    assert words in details
    assert "security.token_file" in details
    assert TOKEN not in details


async def test_a_new_token_is_taken_beside_the_old_one(ours):
    both = Security(ours.tls, ("the-new-token-of-ours", TOKEN))
    async with serving(both) as address:
        assert await status(address, both) == await status(address, ours) == 7


async def test_health_needs_no_token(ours):
    async with serving(ours) as address, rpc.channel(address, security=Security(ours.tls)) as channel:
        request = health_pb2.HealthCheckRequest(service="liveness")
        reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=20)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_probes_ask_a_plaintext_port_that_knows_health_alone(ours):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        health = f"127.0.0.1:{probe.getsockname()[1]}"
    async with serving(ours, health_listen=health), grpc.aio.insecure_channel(health) as channel:
        request = health_pb2.HealthCheckRequest(service="liveness")
        reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=20)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert (await refusal(health, PLAIN))[0] == grpc.StatusCode.UNIMPLEMENTED


async def test_a_taken_health_port_is_named(ours):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(rpc.AddressInUse, match="--health-listen"):
            await rpc.Server.start("127.0.0.1:0", [], health_listen=f"127.0.0.1:{taken.getsockname()[1]}")


async def explained(address, caller, caplog):
    """The line that a client that waits for its server logs."""
    with caplog.at_level(logging.ERROR, logger="headrace.rpc"):
        async with rpc.channel(address, security=caller) as channel:
            task = asyncio.ensure_future(rpc.explain_failures(channel, address, caller))
            async with asyncio.timeout(60):
                while not caplog.records:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.wait({task})
    (record,) = caplog.records
    return record.getMessage()


async def test_a_wrong_authority_is_explained(ours, tmp_path, caplog):
    stranger = security.read(Authority(tmp_path, "stranger").issue("service").tls(), None)
    async with serving(ours) as address:
        assert (await refusal(address, stranger))[0] == grpc.StatusCode.UNAVAILABLE
        line = await explained(address, stranger, caplog)
    assert address in line
    assert "must be signed by security.tls.authority" in line


async def test_a_certificate_for_another_host_is_explained(authority, ours, caplog):
    other = security.read(authority.issue("elsewhere", "elsewhere.example").tls(), None)
    async with serving(other) as address:
        line = await explained(address, ours, caplog)
    assert "and name 127.0.0.1" in line


async def test_a_server_may_be_known_by_another_name_than_its_address(authority, ours):
    other = security.read(authority.issue("engines", "engines.example").tls(), None)
    async with serving(other) as address:
        async with rpc.channel(address, security=ours, name="engines.example") as channel:
            request = pb.GetTrainerStatusRequest()
            assert (await pb_grpc.TrainerServiceStub(channel).GetTrainerStatus(request, timeout=20)).step == 7
        assert await security.diagnose(address, ours, name="engines.example") == ""


async def test_plaintext_against_tls_is_explained(ours, caplog):
    async with serving(ours) as address:
        assert (await refusal(address, PLAIN))[0] == grpc.StatusCode.UNAVAILABLE
        assert "set security.tls here too" in await explained(address, PLAIN, caplog)


async def test_tls_against_plaintext_is_explained(ours, caplog):
    async with serving(PLAIN) as address:
        assert "speaks no TLS" in await explained(address, ours, caplog)
        assert await security.diagnose(address, PLAIN) == ""


async def test_nothing_is_wrong_with_a_server_that_has_not_started(ours):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    assert await security.diagnose(address, ours) == await security.diagnose(address, PLAIN) == ""


async def test_client_certificates_are_asked_for_and_checked(authority, folder, tmp_path, caplog):
    asking = security.read(authority.issue("asking").tls(client_certificates=True), None)
    bare = Security(security.Tls(authority=asking.tls.authority))
    foreign = Authority(tmp_path, "stranger").issue("foreign")
    wrong = security.read(foreign._replace(authority=authority.path).tls(), None)
    async with serving(asking) as address:
        assert await status(address, asking) == 7
        for caller in (bare, wrong):
            assert (await refusal(address, caller))[0] == grpc.StatusCode.UNAVAILABLE
        assert "refuses our certificate" in await explained(address, bare, caplog)


async def test_an_environment_gets_its_token_and_no_other(ours, folder):
    own = token_file(folder, "the-token-of-this-environment", name="environment-token")
    caller = security.caller(ours, tls=True, token_file=own)
    assert caller.tokens == ("the-token-of-this-environment",)
    assert caller.tls is ours.tls
    assert security.caller(ours, tls=False, token_file=None) == PLAIN


def test_tokens_and_keys_are_in_no_representation(ours):
    for text in (repr(ours), str(ours), repr(ours.tls)):
        assert TOKEN not in text
        assert "PRIVATE" not in text


def broken(folder, authority):
    good, other = authority.issue("good"), authority.issue("other")
    absent, empty, short, binary = (folder / name for name in ("absent", "empty", "short", "binary"))
    empty.write_text("\n")
    short.write_text("secret\n")
    binary.write_bytes(b"\xff" * 40)
    return {
        "absent certificate": (good._replace(certificate=absent), None, "security.tls.certificate"),
        "another's key": (good._replace(key=other.key), None, "security.tls:"),
        "no PEM": (good._replace(certificate=short), None, "security.tls:"),
        "no authority": (good._replace(authority=short), None, "security.tls.authority"),
        "absent token": (good, absent, "token_file"),
        "empty token": (good, empty, "at least 16 characters"),
        "short token": (good, short, "at least 16 characters"),
        "binary token": (good, binary, "ASCII"),
    }


FILES = ("absent certificate", "another's key", "no PEM", "no authority")
TOKEN_FILES = ("absent token", "empty token", "short token", "binary token")


@pytest.mark.parametrize("case", FILES + TOKEN_FILES)
def test_what_is_wrong_with_a_file_is_told_in_one_line(case, authority, tmp_path):
    files, token, words = broken(tmp_path, authority)[case]
    with pytest.raises(StartupError) as caught:
        security.read(files.tls(), token)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert "secret" not in message.replace(str(tmp_path), "")


def test_the_secrets_that_the_documentation_makes_are_ones_that_services_take(tmp_path):
    page = (processes.ROOT / "docs" / "security.md").read_text()
    (script,) = (block for block in page.split("```sh\n") if "openssl req -x509" in block)
    subprocess.run(["sh", "-ec", script.partition("```")[0]], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    for name in ("services", "environments", "redis"):
        files = Issued(tmp_path / f"{name}.crt", tmp_path / f"{name}.key", tmp_path / "ca.crt")
        assert len(security.read(files.tls(), tmp_path / "token").tokens) == 1
    text = subprocess.run(
        ["openssl", "x509", "-noout", "-ext", "subjectAltName", "-in", "services.crt"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    for component in ("trainer", "gateway", "inference"):
        assert f"DNS:run-headrace-{component}.headrace.svc" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"security": {"token_file": "t"}}, "security.token_file needs security.tls"),
        ({"environments.guess_number.token_file": "t"}, "environments.guess_number.token_file needs TLS"),
        ({"environments.guess_number.tls": True}, "we serve it without a certificate"),
        (
            {"security": {"tls": {"certificate": "c", "key": "k", "client_certificates": True}}},
            "security.tls: client_certificates needs an authority",
        ),
        ({"security": {"tls": {"certificate": "c"}}}, "security.tls.key: missing"),
    ],
)
def test_what_protects_nothing_is_refused(changes, words):
    with pytest.raises(config.ConfigError, match=words):
        config.load("configs/guess_number.yaml", overrides=changes)
