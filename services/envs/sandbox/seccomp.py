"""A seccomp filter for what a model wrote: no socket but of the kind AF_UNIX, and none of the kernel's sharper tools.

Installed without any right, in containers too. It stays for good and for all descendants. Standard library only, for it
is installed between fork and exec.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
AF_UNIX = 1
# Every namespace's flag of clone(2).
NEW_NAMESPACES = 0x7E020000

# From the kernel's system call tables: number on x86-64, on arm64.
SOCKET, SOCKETPAIR, CLONE, CLONE3 = (41, 198), (53, 199), (56, 220), (435, 435)
LEAVE_GROUP = {"setsid": (112, 157), "setpgid": (109, 154)}
DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "io_uring_setup": (425, 425),  # its operations would pass by this filter
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "syslog": (103, 116),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
}
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16


def install(*, keep_network: bool, keep_group: bool) -> None:
    """Filters this process's calls from here on.

    Args:
        keep_network: allows sockets of every kind.
        keep_group: refuses to leave the process group, so that a signal to it reaches every descendant.

    Raises OSError: the kernel or this processor has no such filter.
    """
    program = build(platform.machine(), keep_network=keep_network, keep_group=keep_group)

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    libc = ctypes.CDLL(None, use_errno=True)
    pointer = ctypes.byref(Program(len(program) // 8, program))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, pointer, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp refuses the filter")


def build(machine: str, *, keep_network: bool, keep_group: bool) -> bytes:
    """The filter as a classic BPF program. Raises OSError for a processor whose calls are not known here."""
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no seccomp filter for {machine}")
    column, architecture = ARCHITECTURES[machine]
    lines = [
        _line(_LOAD, _ARCHITECTURE_AT),
        _line(_JUMP_EQUAL, architecture, 1, 0),
        _line(_RETURN, _KILL),  # 32-bit calls have other numbers
        _line(_LOAD, _NUMBER_AT),
    ]
    if machine == "x86_64":
        lines += [_line(_JUMP_GREATER_EQUAL, 0x40000000, 0, 1), _line(_RETURN, _KILL)]  # the x32 calls
    refused = [numbers[column] for numbers in (*DENIED.values(), *(LEAVE_GROUP.values() if keep_group else ()))]
    for number in refused:
        lines += [_line(_JUMP_EQUAL, number, 0, 1), _line(_RETURN, _ERROR | errno.EPERM)]
    # Its flags lie in memory, where no filter can look. The C library then takes clone instead.
    lines += [_line(_JUMP_EQUAL, CLONE3[column], 0, 1), _line(_RETURN, _ERROR | errno.ENOSYS)]
    lines += [
        _line(_JUMP_EQUAL, CLONE[column], 0, 4),
        _line(_LOAD, _FIRST_ARGUMENT_AT),
        _line(_JUMP_ANY_BIT, NEW_NAMESPACES, 0, 1),
        _line(_RETURN, _ERROR | errno.EPERM),
        _line(_RETURN, _ALLOW),
    ]
    if not keep_network:
        for number in (SOCKET[column], SOCKETPAIR[column]):
            lines += [
                _line(_JUMP_EQUAL, number, 0, 4),
                _line(_LOAD, _FIRST_ARGUMENT_AT),
                _line(_JUMP_EQUAL, AF_UNIX, 1, 0),
                _line(_RETURN, _ERROR | errno.EACCES),
                _line(_RETURN, _ALLOW),
            ]
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _line(code: int, value: int, jump_if_true: int = 0, jump_if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_if_true, jump_if_false, value)
