"""Linux namespaces for a sandbox: processes, files, network and users of its own. Works without any right where the
kernel allows user namespaces, and as root.

What is left of the file system is read-only: an empty root with the readable paths in it, a few devices, and a scratch
directory in memory of limited size. Standard library only. The order of the steps matters; see user_namespaces(7).
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
from collections.abc import Sequence

NOBODY = 65534
NEW_MOUNTS, NEW_CGROUPS, NEW_NAMES, NEW_IPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEW_USERS, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXECUTION, REMOUNT, BIND, RECURSIVE = 1, 2, 4, 8, 32, 4096, 16384
RELATIVE_TIMES, DETACH = 1 << 21, 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP = 1, 24
# Flags of statvfs that are locked in a mount from outside, and their names for mount(2).
LOCKED = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: RELATIVE_TIMES}
DEVICES = ("null", "zero", "full", "random", "urandom")
SCRATCH = "/scratch"

_libc = ctypes.CDLL(None, use_errno=True)


def enter(
    readable: Sequence[str], hidden: Sequence[str], *, keep_network: bool, scratch_bytes: int, scratch_files: int
) -> None:
    """Returns in the first process of new namespaces, as nobody and without rights, in the directory SCRATCH.

    The calling process waits for that process and exits with it; that one dies with the calling process.

    Args:
        readable: paths to see; directories with what is beneath, but for `hidden` paths.

    Raises OSError: the kernel refuses a step, which the error names. Nothing runs then in half-made namespaces.
    """
    was_root = os.geteuid() == 0
    _new_user_namespace(was_root, 0 if keep_network else NEW_NETWORK)
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        _wait(child, ours)
    os.close(ours)
    try:
        _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
        _make_root(readable, hidden, scratch_bytes, scratch_files)
        _drop_rights(was_root)
        os.chdir(SCRATCH)
    except OSError as error:
        os.write(theirs, f"{error.errno} {error.strerror}".encode())
        os._exit(1)
    os.close(theirs)


def _new_user_namespace(was_root: bool, network: int) -> None:
    """Moves into the namespaces. A child that stays outside writes root's mapping, which takes root's rights there."""
    uid, gid, pid = os.geteuid(), os.getegid(), os.getpid()
    entered, enter = os.pipe()
    writer = os.fork() if was_root else 0
    if was_root and writer == 0:
        os.close(enter)
        os.read(entered, 1)
        try:
            _write_mappings(pid, f"0 0 1\n{NOBODY} {NOBODY} 1", f"0 0 1\n{NOBODY} {NOBODY} 1")
        except OSError:
            os._exit(1)
        os._exit(0)
    try:
        flags = NEW_USERS | NEW_MOUNTS | NEW_PROCESSES | NEW_IPC | NEW_NAMES | NEW_CGROUPS | network
        _check(_libc.unshare(flags), "new namespaces (unshare)")
    finally:
        os.close(enter)
        os.close(entered)
        failed = bool(was_root and os.waitpid(writer, 0)[1])
    if failed:
        raise OSError(1, "mapping of users into a namespace")
    if not was_root:
        with open("/proc/self/setgroups", "w") as file:
            file.write("deny")
        _write_mappings(pid, f"{NOBODY} {uid} 1", f"{NOBODY} {gid} 1")


def _write_mappings(pid: int, users: str, groups: str) -> None:
    for name, mapping in (("uid_map", users), ("gid_map", groups)):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(mapping)


def _wait(child: int, errors: int) -> None:
    """Waits in the process outside, holding nothing; raises what the child could not do."""
    message = os.read(errors, 1000).decode()
    if message:
        os.waitpid(child, 0)
        number, _, text = message.partition(" ")
        raise OSError(int(number), text)
    os.closerange(0, 1024)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else 1)


def _make_root(readable: Sequence[str], hidden: Sequence[str], scratch_bytes: int, scratch_files: int) -> None:
    # Mounts need no further separation: in a user namespace of its own none of them reaches the one outside.
    root = "/tmp"  # only a place to mount at: nothing is written there
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in readable}
    sources |= {f"/dev/{name}": os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC) for name in DEVICES}
    links = {path: os.readlink(path) for path in readable if os.path.islink(path)}
    _mount("tmpfs", root, "tmpfs", NO_SETUID, "size=4m,mode=755")
    for path, source in sources.items():
        place = root + path
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if os.path.lexists(place):
            pass  # beneath another that is there already
        elif path in links:
            os.symlink(links[path], place)
        else:
            _bind(source, place, 0 if path.startswith("/dev/") else NO_DEVICES)
        os.close(source)
    for path in hidden:
        if os.path.isdir(root + path):
            _mount("tmpfs", root + path, "tmpfs", NO_SETUID | NO_DEVICES | READ_ONLY, "size=4k")
    os.makedirs(root + "/proc")
    try:
        _mount("proc", root + "/proc", "proc", NO_SETUID | NO_DEVICES | NO_EXECUTION)
        os.symlink("/proc/self/fd", root + "/dev/fd")
    except OSError:
        pass  # refused inside containers that hide parts of theirs: then there is no /proc
    os.makedirs(root + SCRATCH)
    options = f"size={scratch_bytes},nr_inodes={scratch_files},mode=700,uid={NOBODY},gid={NOBODY}"
    _mount("tmpfs", root + SCRATCH, "tmpfs", NO_SETUID | NO_DEVICES, options)
    if not os.path.lexists(root + "/tmp"):  # there when Python itself lies beneath
        os.symlink(SCRATCH, root + "/tmp")
    os.chdir(root)
    _mount("none", root, "", REMOUNT | BIND | READ_ONLY | NO_SETUID)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", DETACH), "umount2")


def _bind(source: int, place: str, more_flags: int) -> None:
    if stat.S_ISDIR(os.fstat(source).st_mode):
        os.makedirs(place, exist_ok=True)
    else:
        os.close(os.open(place, os.O_WRONLY | os.O_CREAT, 0o644))
    _mount(f"/proc/self/fd/{source}", place, "", BIND | RECURSIVE)
    has = os.statvfs(place).f_flag
    locked = sum(flag for bit, flag in LOCKED.items() if has & bit)
    _mount("none", place, "", REMOUNT | BIND | READ_ONLY | NO_SETUID | more_flags | locked)


def _drop_rights(was_root: bool) -> None:
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # beyond the last that the kernel knows
    if was_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        # A change of user has cleared it.
        _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, none), "capset")


def _mount(source: str, place: str, kind: str, flags: int, options: str = "") -> None:
    result = _libc.mount(source.encode(), place.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(result, f"mount of {kind or source} at {place}")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
