"""Where the strength `process` begins: a new Python process shuts itself in, then becomes the supervisor.

Started by process.py as `python -I -S -c "…jail.main()" CONFIG`, where CONFIG is JSON. Two ways lead to the same
isolation, and the caller names one: `namespaces`, and, where those are refused, `landlock` (files and signals) with
seccomp (network, process group). A refusal is answered in place of the supervisor's first message.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

from services.envs.sandbox import landlock, namespaces, seccomp, supervisor

PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Serves the sandbox of a config until stdin ends."""
    config = json.loads(sys.argv[1])
    try:
        confine = _in_namespaces(config) if config["way"] == "namespaces" else _under_landlock(config)
        supervisor.harden()
    except OSError as error:
        body = json.dumps({"error": str(error.strerror or error)}).encode()
        os.write(1, len(body).to_bytes(4, "big") + body)
        sys.exit(1)
    supervisor.Supervisor(config, confine).serve()


def _in_namespaces(config: dict[str, Any]) -> Callable[[], None]:
    namespaces.enter(
        config["readable"],
        config["hidden"],
        keep_network=config["allow_network"],
        scratch_bytes=config["limits"]["scratch_bytes"],
        scratch_files=config["limits"]["scratch_files"],
    )
    config["scratch"] = namespaces.SCRATCH
    config["nproc"] = config["limits"]["processes"] + 1  # the supervisor
    return lambda: seccomp.install(keep_network=config["allow_network"], keep_group=False)


def _under_landlock(config: dict[str, Any]) -> Callable[[], None]:
    if os.geteuid() == 0:
        raise OSError("Landlock serves only a user other than root, whose number of processes has no limit")
    # The limit counts all processes of the user, other sandboxes among them.
    config["nproc"] = _threads_of_this_user() + config["limits"]["processes"] * config["max_open"]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    readable, listable = _without(config["readable"], config["hidden"])
    readable += [f"/dev/{name}" for name in namespaces.DEVICES]
    landlock.restrict(readable=readable, listable=listable, writable=[config["scratch"], "/dev/null"])

    def confine() -> None:
        landlock.shut_in()
        seccomp.install(keep_network=config["allow_network"], keep_group=True)

    return confine


def readable_paths() -> tuple[list[str], list[str]]:
    """What a sandbox sees of this machine: programs, libraries and Python's own; and what it must not see of that."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = os.path.join(os.path.realpath(sys.base_prefix), "lib")
    standard = os.path.join(library, version)
    readable = ["/bin", "/sbin", "/lib", "/lib64", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib64", "/usr/libexec"]
    python = os.path.realpath(sys.executable)
    readable += ["/usr/share", "/etc/alternatives", "/etc/ld.so.cache", standard, python]
    readable += [os.path.join(os.path.dirname(python), name) for name in ("python", "python3")]
    readable += sorted({os.path.realpath(path) for path in glob.glob(os.path.join(library, "libpython*.so*"))})
    readable += sorted(glob.glob(os.path.join(library, "libpython*.so*")))
    project = os.path.abspath(__file__).rsplit("/services/", 1)[0]
    hidden = [os.path.join(standard, "site-packages"), os.path.join(standard, "dist-packages")]
    hidden += [os.path.join(project, name) for name in ("services", "headrace")]
    return [path for path in dict.fromkeys(readable) if os.path.lexists(path)], hidden


def _without(paths: Iterable[str], hidden: Collection[str]) -> tuple[list[str], list[str]]:
    """Paths to allow so that hidden ones stay hidden, since Landlock can only add; and directories above those."""
    readable, above = [], []
    for path in paths:
        if path in hidden:
            continue
        if any(other.startswith(path + "/") for other in hidden) and os.path.isdir(path):
            above.append(path)
            inner_readable, inner_above = _without((os.path.join(path, name) for name in os.listdir(path)), hidden)
            readable += inner_readable
            above += inner_above
        else:
            readable.append(path)
    return readable, above


def _threads_of_this_user() -> int:
    count = 0
    for path in glob.glob("/proc/[0-9]*/status"):
        try:
            with open(path) as file:
                fields = dict(line.split(":", 1) for line in file)
        except OSError:
            continue
        if int(fields["Uid"].split()[0]) == os.getuid():
            count += int(fields["Threads"])
    return count
