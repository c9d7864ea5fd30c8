"""The package that others install: it holds the stubs, which are generated and not committed."""

import shutil
import subprocess
import sys
import zipfile

from tests.processes import ROOT


def test_the_wheel_holds_the_generated_stubs(tmp_path):
    source = tmp_path / "source"
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    for name in names:
        if name.startswith(("headrace/", "services/", "proto/", "tools/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(source)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    for proto in (ROOT / "proto" / "headrace" / "v1").glob("*.proto"):
        assert {f"headrace/v1/{proto.stem}{ending}" for ending in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")} <= inside
    assert not [name for name in inside if name.startswith(("tests/", "benchmarks/", "tools/"))]
