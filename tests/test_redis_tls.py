"""A Redis that speaks TLS, by a rediss:// address: who trusts its authority gets in, others are told why not."""

import subprocess

import pytest
import redis.exceptions

from headrace import config, stream
from tests import processes
from tests.certificates import Authority
from tests.rollout.rig import task

PASSWORD = "a-password-that-no-log-shows"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(port, file of the authority) of a Redis with a password that speaks TLS alone."""
    folder = tmp_path_factory.mktemp("redis")
    files = Authority(folder).issue("redis")
    port = processes.free_port()
    arguments = [
        *(processes.redis_executable(), "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1"),
        *("--tls-cert-file", str(files.certificate), "--tls-key-file", str(files.key)),
        *("--tls-ca-cert-file", str(files.authority), "--tls-auth-clients", "no"),
        *("--requirepass", PASSWORD, "--dir", str(folder), "--save", ""),
    ]
    known = subprocess.run([*arguments, "--port", "99999"], capture_output=True, text=True, timeout=30, check=False)
    if "tls-port" in known.stdout + known.stderr:
        pytest.skip("this redis-server was built without TLS")
    with processes.running(arguments, folder / "redis.log", ready=lambda: processes.listening(port)):
        yield port, files.authority


async def test_the_streams_work_over_tls(server):
    port, authority = server
    client = stream.connect(f"rediss://:{PASSWORD}@127.0.0.1:{port}/0?ssl_ca_certs={authority}", timeout_s=20)
    streams = stream.Streams(client, "run", claim_timeout_s=60)
    await streams.open()
    await streams.issue([task(0)], first_sequence=0)
    (ticket,) = await streams.claim("gateway-0", 1, 1.0)
    assert ticket.task.task_id == "00000000"
    await client.aclose()


@pytest.mark.parametrize("scheme", ["another authority", "plaintext"])
async def test_a_connection_that_cannot_be_made_fails(server, scheme, tmp_path):
    port, _ = server
    stranger = Authority(tmp_path, "stranger").path
    url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={stranger}"
    client = stream.connect(url if scheme != "plaintext" else f"redis://127.0.0.1:{port}/0", timeout_s=20)
    with pytest.raises(redis.exceptions.ConnectionError):
        await stream.Streams(client, "run", claim_timeout_s=60).open()
    await client.aclose()


@pytest.mark.parametrize("case", ["another authority", "plaintext", "no such file"])
def test_a_gateway_says_in_one_line_what_is_wrong(server, case, tmp_path):
    port, _ = server
    authority = tmp_path / "absent.crt" if case == "no such file" else Authority(tmp_path, "stranger").path
    scheme, query = ("redis", "") if case == "plaintext" else ("rediss", f"?ssl_ca_certs={authority}")
    run = config.load(
        "configs/guess_number.yaml",
        overrides={
            "run.id": "run",
            "run.directory": str(tmp_path),
            "redis": {"url": f"{scheme}://:{PASSWORD}@127.0.0.1:{port}/0{query}", "timeout_s": 2.0},
            "trainer.address": "127.0.0.1:1",
            "inference.addresses": ["127.0.0.1:1"],
            "environments.guess_number.address": "127.0.0.1:1",
        },
    )
    path = tmp_path / "run.yaml"
    path.write_text(config.dump(run))
    places = ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--name", "gateway-0"]
    done = subprocess.run(
        processes.service("rollout", "--config", str(path), *places),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=processes.ROOT,
    )
    assert done.returncode == 2, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error:"))
    words = {"another authority": "ssl_ca_certs", "plaintext": "rediss://", "no such file": "ssl_ca_certs"}
    assert words[case] in line
    assert PASSWORD not in done.stderr
