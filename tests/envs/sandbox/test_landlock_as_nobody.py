"""Landlock's way needs a user other than root, and tests often run as root: the same tests again, as nobody."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.envs.sandbox import landlock

ROOT = Path(__file__).resolve().parents[3]
NOBODY = 65534
# What is the kernel's work, and quick; `make test-slow` tries all of it.
QUICK = "landlock and (network or outside_files or symlink or signals or zombies or privileges or state)"

ALL = "landlock and not as_nobody"


@pytest.mark.skipif(os.geteuid() != 0, reason="the tests run as a user other than root: no need to run them again")
@pytest.mark.skipif(landlock.version() < landlock.FIRST_VERSION_WITH_SCOPES, reason="no Landlock that is new enough")
@pytest.mark.parametrize("selection", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_landlock_as_nobody(selection, tmp_path):
    tmp_path.chmod(0o777)
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    if not _traversable(ROOT) or not _traversable(Path(packages)):
        pytest.skip("nobody cannot reach this checkout")
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("no util-linux")
    python = Path(os.path.realpath(sys.executable))
    pytest_arguments = ["-q", "-p", "no:cacheprovider", "-m", "", "--basetemp", "/tmp/pytest", "-k", selection]
    environment = ["env", "-i", f"PYTHONPATH={packages}", "PYTHONDONTWRITEBYTECODE=1"]
    command = shlex.join([*environment, str(python), "-m", "pytest", *pytest_arguments, "tests/envs/sandbox"])
    script = "\n".join(
        [
            "set -e",
            *_uncovered(python),
            # Temporary files of root's tests must neither be in the way nor within reach.
            f"mount --bind {shlex.quote(str(tmp_path))} /tmp" if ROOT.parts[1] != "tmp" else "",
            f"exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups {command}",
        ]
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=170, check=False
    )
    if "unshare: unshare failed" in done.stderr:
        pytest.skip("root has no right to mount here")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout


def _uncovered(python: Path) -> list[str]:
    """Commands that let nobody reach the interpreter, should it lie in root's home."""
    if _traversable(python):
        return []
    prefix, home = shlex.quote(sys.base_prefix), shlex.quote(f"/{python.parts[1]}")
    return [
        f"mount --bind {prefix} /mnt",
        f"mount -t tmpfs -o mode=755 none {home}",
        f"mkdir -p {prefix}",
        f"mount --bind /mnt {prefix}",
    ]


def _traversable(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)
