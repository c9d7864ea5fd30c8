"""What an environment's author installs: the SDK imports protobuf, its server the gRPC family and a metrics library."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests import processes

AUTHORS = ("environment", "schema", "single_turn", "tools")
SERVING = ("blocking", "catalog", "pool", "server", "worker", "__main__")

BLOCK = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in {allowed}:
            raise ImportError("the light install has no " + name)

sys.meta_path.insert(0, Block())
"""


def runs_with_only(allowed: set[str], program: str) -> None:
    subprocess.run(
        [sys.executable, "-c", BLOCK.replace("{allowed}", repr(allowed | {"headrace", "services"})) + program],
        cwd=processes.ROOT,
        check=True,
        timeout=60,
    )


def test_authors_need_protobuf_only():
    runs_with_only({"google"}, "\n".join(f"import services.envs.{module}" for module in AUTHORS))


def test_a_server_and_the_kit_need_grpc_and_a_metrics_library():
    family = {"google", "grpc", "grpc_health", "grpc_reflection", "prometheus_client", "typing_extensions"}
    imports = "\n".join(f"import services.envs.{module}" for module in SERVING)
    kit = "\nimport headrace.__main__; headrace.__main__._parser()"
    found = "\nservices.envs.catalog.find('guess_number', {})"
    runs_with_only(family, imports + found + kit)


@pytest.mark.slow
def test_a_fresh_install_serves_and_checks(tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    # A copy, because a build leaves its own beside the sources.
    ignore = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "v1", "tests", "node_modules", "__pycache__")
    source = shutil.copytree(processes.ROOT, tmp_path / "source", ignore=ignore)
    shutil.copytree(processes.ROOT / "proto", source / "proto", dirs_exist_ok=True)
    install = [python, "-m", "pip", "install", "--quiet", f"{source}[envs]"]
    subprocess.run(install, check=True, timeout=170)
    (tmp_path / "odd_box.py").write_text(
        (processes.ROOT / "examples" / "python_environment" / "odd_box.py").read_text()
    )
    address = f"127.0.0.1:{processes.free_port()}"
    server = subprocess.Popen([python, "-m", "services.envs", "odd_box:OddBox", "--listen", address], cwd=tmp_path)
    try:
        command = Path(python).with_name("headrace")
        processes.wait_until(lambda: processes.serving(address), timeout_s=60)
        subprocess.run([command, "env", "check", address, "--parallel", "50"], cwd=tmp_path, check=True, timeout=120)
    finally:
        server.terminate()
        assert server.wait(60) == 0
    names = {path.name.partition("-")[0] for path in (tmp_path / "venv" / "lib").glob("*/site-packages/*.dist-info")}
    assert names - {"pip", "setuptools"} == {
        *("grpcio", "grpcio_health_checking", "grpcio_reflection", "headrace", "prometheus_client", "protobuf"),
        "typing_extensions",
    }
