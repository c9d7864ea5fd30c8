"""Landlock: file access for this process and its descendants cut down to a few directories, by the kernel, for good.

Needs no right and works in containers where namespaces are refused. Standard library only.
Interface: https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every processor
GET_VERSION = 1
RULE_PATH_BENEATH = 1
PR_SET_NO_NEW_PRIVS = 38

EXECUTE, WRITE_FILE, READ_FILE, READ_DIRECTORY = 1, 2, 4, 8
# Versions 1, 2 and 3 know 13 rights, renaming into another directory, and truncation; 5 adds device ioctls.
RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 1, 2
FIRST_VERSION_WITH_SCOPES = 6
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """The kernel's version of Landlock; 0 without it."""
    return max(0, _libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(GET_VERSION)))


def restrict(*, readable: Iterable[str], listable: Iterable[str], writable: Iterable[str]) -> None:
    """Leaves these paths, with what is beneath, and signals to processes that are restricted by this or a later call.

    Of what is beneath a listable path only names are to be had. Paths that do not exist are passed over. Raises OSError
    where the kernel cannot do all of it.
    """
    if version() < FIRST_VERSION_WITH_SCOPES:
        raise OSError(f"Landlock has version {version()} here, and signals need {FIRST_VERSION_WITH_SCOPES}")
    handled = RIGHTS[5]
    rules = _ruleset(struct.pack("=QQQ", handled, 0, SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS))
    try:
        for path in readable:
            _allow(rules, path, EXECUTE | READ_FILE | READ_DIRECTORY)
        for path in listable:
            _allow(rules, path, READ_DIRECTORY)
        for path in writable:
            _allow(rules, path, handled)
        _enforce(rules)
    finally:
        os.close(rules)


def shut_in() -> None:
    """Forbids signals to every process that is not restricted by this very call. Raises OSError."""
    rules = _ruleset(struct.pack("=QQQ", 0, 0, SCOPE_SIGNALS))
    try:
        _enforce(rules)
    finally:
        os.close(rules)


def _ruleset(attributes: bytes) -> int:
    return _checked(_libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)))


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= OF_FILES
        rule = struct.pack("=Qi", rights, fd)
        _checked(_libc.syscall(ADD_RULE, rules, RULE_PATH_BENEATH, rule, ctypes.c_uint32(0)))
    finally:
        os.close(fd)


def _enforce(rules: int) -> None:
    _checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(_libc.syscall(RESTRICT_SELF, rules, ctypes.c_uint32(0)))


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
