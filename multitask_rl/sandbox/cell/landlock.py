"""Landlock: a process without privileges gives up paths, TCP ports, foreign signals and abstract sockets.

Source: Linux ``Documentation/userspace-api/landlock.rst``; the version of the kernel decides what is handled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from .linux import syscall

_CREATE, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_READ_FILE, _WRITE_FILE, _READ_DIR = 1 << 2, 1 << 1, 1 << 3
_LAST_FS_RIGHT = {1: 12, 2: 13, 3: 14, 4: 14}
_ALL_TCP, _ALL_SCOPES = 3, 3


def abi_version() -> int:
    """Return the version of Landlock in this kernel, 0 when there is none."""
    try:
        return syscall(_CREATE, None, 0, _VERSION_FLAG)
    except OSError:
        return 0


def restrict_to(readable: Iterable[str], devices: Iterable[str], listed: Iterable[str]) -> None:
    """Confine this process, and all it starts, to these paths; ``OSError`` if the kernel has no Landlock.

    Files, and directories with all below, are ``readable``; ``devices`` are read and written; in ``listed``
    directories, and below, only names can be listed.
    """
    version = abi_version()
    if version < 1:
        raise OSError("this kernel has no Landlock")
    rights = (1 << (_LAST_FS_RIGHT.get(version, 15) + 1)) - 1
    attributes = struct.pack("=QQQ", rights, _ALL_TCP, _ALL_SCOPES)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    block = ctypes.create_string_buffer(attributes[:size], size)
    ruleset = syscall(_CREATE, block, size, 0)
    try:
        wanted = [(path, _READ_FILE | _READ_DIR) for path in readable]
        wanted += [(path, _READ_DIR) for path in listed]
        wanted += [(path, _READ_FILE | _WRITE_FILE) for path in devices]
        for path, allowed in wanted:
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
                    allowed = allowed if is_directory else allowed & ~_READ_DIR
                    rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, descriptor), 12)
                    syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
                finally:
                    os.close(descriptor)
        syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
