"""System calls that Python has no function for, by ``ctypes``; x86_64 Linux only.

Every call goes through one ``syscall`` bound with ``PyDLL``: the GIL stays held, which a raw ``clone`` needs
(the child continues as the only thread of a consistent interpreter). ``prepare_call`` returns the arguments
of a call that a program's own process makes later; this touches few pages.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from typing import Any, NoReturn

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID, _CLONE_PIDFD, _SIGCHLD = 0x00200000, 0x01000000, 0x00001000, 17

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_UNBINDABLE, MS_PRIVATE = 4096, 16384, 1 << 17, 1 << 18
_MNT_DETACH = 2

NR_CHDIR, NR_SETPGID, NR_SETSID, NR_CAPSET, NR_STATFS, NR_PRCTL = 80, 109, 112, 126, 137, 157
NR_CHROOT, NR_MOUNT, NR_PRLIMIT64 = 161, 165, 302
NR_PIVOT_ROOT, NR_UNSHARE = 155, 272
_NR_MPROTECT, _NR_CLONE, _NR_UMOUNT2, _NR_GETTID = 10, 56, 166, 186
_NR_GET_ROBUST_LIST, _NR_MOUNT_SETATTR = 274, 442
_PROT_READ, _PROT_WRITE, _PROT_EXEC = 1, 2, 4
PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 38, 47
_AMBIENT_RAISE, _AMBIENT_CLEAR_ALL = 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
CAPABILITY_HEADER, NO_CAPABILITIES = struct.pack("=II", 0x20080522, 0), bytes(24)
"""For ``capset``: version 3 for this process, and no capability in any set."""

_libc = ctypes.PyDLL(None, use_errno=True)
raw_syscall = _libc.syscall
"""Takes what ``prepare_call`` made and returns -1 on failure."""
raw_syscall.restype = ctypes.c_long


def is_supported() -> bool:
    """Return whether this is 64-bit x86 Linux, for which the system call numbers are."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 1 << 32


def prepare_call(number: int, *arguments: Any) -> tuple[Any, ...]:
    """Return system call ``number`` with its arguments as ``raw_syscall`` takes them, for a later call."""
    return (ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))


def syscall(number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call; ``OSError`` where the kernel refuses it."""
    result: int = raw_syscall(*prepare_call(number, *arguments))
    if result == -1:
        raise_errno(f"system call {number}")
    return result


def raise_errno(what: str) -> NoReturn:
    """Raise the error of the last system call."""
    error = ctypes.get_errno()
    raise OSError(error, f"{what}: {os.strerror(error)}")


def mount(source: bytes, target: bytes, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
    """Mount ``source`` on ``target``."""
    syscall(NR_MOUNT, source, target, kind, flags, data)


def umount(target: bytes) -> None:
    """Detach the mount on ``target``."""
    syscall(_NR_UMOUNT2, target, _MNT_DETACH)


def set_mount_read_only(target: bytes) -> None:
    """Add nosuid, nodev, ro to the mounts on ``target``; a remount would have to repeat locked attributes."""
    block = ctypes.create_string_buffer(struct.pack("=QQQQ", 0x1 | 0x2 | 0x4, 0, 0, 0), 32)
    syscall(_NR_MOUNT_SETATTR, _AT_FDCWD, target, _AT_RECURSIVE, block, 32)


def set_no_new_privs() -> None:
    """Let no later ``exec`` gain rights; an ordinary user needs this to install a filter."""
    syscall(NR_PRCTL, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def set_parent_death_signal(signal: int) -> None:
    """Ask the kernel for ``signal`` when the parent *thread* ends."""
    syscall(NR_PRCTL, PR_SET_PDEATHSIG, signal, 0, 0, 0)


def keep_capabilities_over_exec(capabilities: list[int]) -> None:
    """Keep exactly these capabilities, through ``execve`` too, for a user who is not root."""
    mask = sum(1 << capability for capability in capabilities)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    syscall(NR_CAPSET, CAPABILITY_HEADER, struct.pack("=IIIIII", low, low, low, high, high, high))
    syscall(NR_PRCTL, _PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in capabilities:
        syscall(NR_PRCTL, _PR_CAP_AMBIENT, _AMBIENT_RAISE, capability, 0, 0)


def clone(flags: int = 0) -> int:
    """Fork a process of one thread into new namespaces, if any, without fork hooks; 0 in the child."""
    return syscall(_NR_CLONE, *_clone_flags(flags, 0))


def prepare_clone(flags: int, pidfd: ctypes.c_int) -> tuple[Any, ...]:
    """Return a prepared ``clone`` that leaves the child's pidfd in ``pidfd``."""
    return prepare_call(_NR_CLONE, *_clone_flags(flags | _CLONE_PIDFD, ctypes.addressof(pidfd)))


def _clone_flags(flags: int, pidfd_at: int) -> tuple[int, int, int, int, int]:
    """Return flags, stack, addresses of pidfd and thread id, thread storage.

    A raw ``clone`` leaves the parent's thread id where glibc keeps it; ``raise`` and ``abort`` of the child
    would use it. glibc keeps the id 16 bytes before the head of the robust list; ``gettid`` confirms that.
    """
    head, length = ctypes.c_void_p(), ctypes.c_size_t()
    call = prepare_call(_NR_GET_ROBUST_LIST, 0, ctypes.byref(head), ctypes.byref(length))
    if raw_syscall(*call) == 0 and head.value:
        tid_at = head.value - 16
        if ctypes.c_int.from_address(tid_at).value == syscall(_NR_GETTID):
            flags |= _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
            return flags | _SIGCHLD, 0, pidfd_at, tid_at, 0
    return flags | _SIGCHLD, 0, pidfd_at, 0, 0


def own_first_page(start: int, length: int, *, is_code: bool) -> None:
    """Rewrite the first byte of a private file mapping, so that its first page becomes this process's own."""
    protection = _PROT_READ | (_PROT_EXEC if is_code else 0)
    syscall(_NR_MPROTECT, start, length, protection | _PROT_WRITE)
    ctypes.memmove(start, ctypes.string_at(start, 1), 1)
    syscall(_NR_MPROTECT, start, length, protection)
