"""System calls that Python has no function for, by ``ctypes``; x86_64 Linux only.

Every call goes through one ``syscall`` bound with ``PyDLL``: the GIL stays held, which a raw ``clone`` needs
(the child continues as the only thread of a consistent interpreter).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from typing import Any, NoReturn

__all__ = [
    "CLONE_NEWCGROUP",
    "CLONE_NEWIPC",
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "CLONE_NEWUSER",
    "CLONE_NEWUTS",
    "MOUNT_DETACH",
    "MS_BIND",
    "MS_NODEV",
    "MS_NOEXEC",
    "MS_NOSUID",
    "MS_PRIVATE",
    "MS_RDONLY",
    "MS_REC",
    "MS_REMOUNT",
    "MS_UNBINDABLE",
    "clone",
    "clone_arguments",
    "fork",
    "is_supported",
    "keep_capabilities_over_exec",
    "mount",
    "own_first_page",
    "pivot_root",
    "prepare_call",
    "prepare_chdir",
    "prepare_chroot",
    "prepare_drop_capabilities",
    "prepare_limit",
    "prepare_mount",
    "prepare_own_group",
    "prepare_parent_death_signal",
    "prepare_setsid",
    "prepare_statfs",
    "raise_errno",
    "raw_syscall",
    "set_mount_read_only",
    "set_no_new_privs",
    "set_parent_death_signal",
    "syscall",
    "tid_address",
    "umount",
    "unshare",
]

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_CHILD_CLEARTID = 0x00200000
_CLONE_PIDFD = 0x00001000
CLONE_CHILD_SETTID = 0x01000000
SIGCHLD = 17

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_UNBINDABLE, MS_PRIVATE = 4096, 16384, 1 << 17, 1 << 18
MOUNT_DETACH = 2

_NR_MOUNT, _NR_UMOUNT2, _NR_PIVOT_ROOT, _NR_CLONE, _NR_UNSHARE = 165, 166, 155, 56, 272
_NR_MPROTECT, _PROT_READ, _PROT_WRITE, _PROT_EXEC = 10, 1, 2, 4
_NR_SETPGID, _NR_SETSID, _NR_CHDIR, _NR_CHROOT, _NR_PRLIMIT64, _NR_STATFS = 109, 112, 80, 161, 302, 137
_NR_CAPSET, _NR_PRCTL, _NR_GET_ROBUST_LIST, _NR_GETTID, _NR_MOUNT_SETATTR = 126, 157, 274, 186, 442
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 38, 47
_AMBIENT_RAISE, _AMBIENT_CLEAR_ALL = 2, 4
_CAPABILITY_VERSION_3 = 0x20080522
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_libc = ctypes.PyDLL(None, use_errno=True)
raw_syscall = _libc.syscall
"""Takes what ``prepare_call`` made and gives -1 on failure; for where nothing may be touched needlessly."""
raw_syscall.restype = ctypes.c_long


def is_supported() -> bool:
    """Return whether this is 64-bit x86 Linux, the one machine the system call numbers are for."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 1 << 32


def syscall(number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call.

    Raises:
        OSError: the kernel refused it.
    """
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result: int = raw_syscall(ctypes.c_long(number), *converted)
    if result == -1:
        raise_errno(f"system call {number}")
    return result


def raise_errno(what: str) -> NoReturn:
    """Raise what the last system call failed with."""
    error = ctypes.get_errno()
    raise OSError(error, f"{what}: {os.strerror(error)}")


def mount(source: bytes, target: bytes, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
    """Mount ``source`` on ``target``."""
    syscall(_NR_MOUNT, source, target, kind, flags, data)


def umount(target: bytes, flags: int = 0) -> None:
    """Unmount ``target``."""
    syscall(_NR_UMOUNT2, target, flags)


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    syscall(_NR_UNSHARE, flags)


def pivot_root(new: bytes, old: bytes) -> None:
    """Make ``new`` the root and put the old one on ``old``."""
    syscall(_NR_PIVOT_ROOT, new, old)


def set_mount_read_only(target: bytes, *, writable: bool = False) -> None:
    """Add nosuid, nodev and (unless ``writable``) ro to the mount on ``target`` and all below it.

    ``mount_setattr`` adds attributes; a remount would have to repeat the locked ones of the source.
    """
    attributes = 0x2 | (0x4 if not writable else 0) | (0 if writable else 0x1)
    block = ctypes.create_string_buffer(struct.pack("=QQQQ", attributes, 0, 0, 0), 32)
    syscall(_NR_MOUNT_SETATTR, _AT_FDCWD, target, _AT_RECURSIVE, block, 32)


def set_no_new_privs() -> None:
    """No program executed from here on gains rights; also what lets an ordinary user install a filter."""
    syscall(_NR_PRCTL, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def set_parent_death_signal(signal: int) -> None:
    """Ask the kernel for ``signal`` when the parent *thread* ends."""
    syscall(_NR_PRCTL, _PR_SET_PDEATHSIG, signal, 0, 0, 0)


def _capset(mask: int) -> None:
    header = struct.pack("=II", _CAPABILITY_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    syscall(_NR_CAPSET, header, struct.pack("=IIIIII", low, low, low, high, high, high))


_NO_CAPABILITIES = struct.pack("=IIIIII", 0, 0, 0, 0, 0, 0)
_CAPABILITY_HEADER = struct.pack("=II", _CAPABILITY_VERSION_3, 0)


def keep_capabilities_over_exec(capabilities: list[int]) -> None:
    """Keep exactly these capabilities, through ``execve`` too, for a user who is not root."""
    mask = sum(1 << capability for capability in capabilities)
    _capset(mask)
    syscall(_NR_PRCTL, _PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in capabilities:
        syscall(_NR_PRCTL, _PR_CAP_AMBIENT, _AMBIENT_RAISE, capability, 0, 0)


def tid_address() -> int:
    """Return where glibc keeps this thread's id, or 0 when it is not where this glibc puts it.

    A raw ``clone`` leaves the parent's id there; ``raise`` and ``abort`` of the child would use it. In
    glibc's thread descriptor the id stands 16 bytes before the head of the robust list; ``gettid`` confirms.
    """
    head, length = ctypes.c_void_p(), ctypes.c_size_t()
    result = raw_syscall(
        ctypes.c_long(_NR_GET_ROBUST_LIST), ctypes.c_long(0), ctypes.byref(head), ctypes.byref(length)
    )
    if result or not head.value:
        return 0
    address = head.value - 16
    return address if ctypes.c_int.from_address(address).value == syscall(_NR_GETTID) else 0


def clone(flags: int) -> int:
    """Fork into new namespaces; 0 in the child. Neither side runs Python's fork hooks.

    Only for a process with one thread.
    """
    return syscall(_NR_CLONE, *_clone_flags(flags), 0)


def fork() -> int:
    """Fork without Python's fork hooks; 0 in the child."""
    return clone(0)


def _clone_flags(flags: int, pidfd_at: int = 0) -> tuple[int, int, int, int]:
    """Return flags, stack, where the pidfd goes, where the thread id goes."""
    tid_at = tid_address()
    if tid_at:
        flags |= CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID
    return flags | SIGCHLD, 0, pidfd_at, tid_at


def prepare_call(number: int, *arguments: Any) -> tuple[Any, ...]:
    """Return the arguments of ``raw_syscall`` for a call to be made later."""
    return (ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))


def clone_arguments(flags: int, pidfd: ctypes.c_int) -> tuple[Any, ...]:
    """Return a prepared clone that leaves the child's pidfd in ``pidfd``."""
    flags |= _CLONE_PIDFD
    return prepare_call(_NR_CLONE, *_clone_flags(flags, ctypes.addressof(pidfd)), 0)


def prepare_setsid() -> tuple[Any, ...]:
    """Return a prepared ``setsid``."""
    return prepare_call(_NR_SETSID)


def prepare_own_group() -> tuple[Any, ...]:
    """Return a prepared ``setpgid`` into a group of the caller's own."""
    return prepare_call(_NR_SETPGID, 0, 0)


def prepare_chdir(path: bytes) -> tuple[Any, ...]:
    """Return a prepared ``chdir``."""
    return prepare_call(_NR_CHDIR, path)


def prepare_chroot(path: bytes) -> tuple[Any, ...]:
    """Return a prepared ``chroot``."""
    return prepare_call(_NR_CHROOT, path)


def prepare_mount(target: bytes, kind: bytes, options: bytes) -> tuple[Any, ...]:
    """Return a prepared mount of a file system without a source, nosuid and nodev."""
    return prepare_call(_NR_MOUNT, kind, target, kind, MS_NOSUID | MS_NODEV, options)


def prepare_statfs(path: bytes) -> tuple[tuple[Any, ...], Any]:
    """Return a prepared ``statfs`` of a directory and the buffer it fills (``struct statfs``, 120 bytes)."""
    buffer = ctypes.create_string_buffer(120)
    return prepare_call(_NR_STATFS, path, buffer), buffer


def prepare_limit(which: int, value: int) -> tuple[Any, ...]:
    """Return a prepared ``setrlimit`` of soft and hard limit to ``value``."""
    return prepare_call(_NR_PRLIMIT64, 0, which, struct.pack("=QQ", value, value), None)


def prepare_drop_capabilities() -> tuple[Any, ...]:
    """Return a prepared call that gives up every capability (ambient ones fall with the permitted set)."""
    return prepare_call(_NR_CAPSET, _CAPABILITY_HEADER, _NO_CAPABILITIES)


def prepare_parent_death_signal(signal: int) -> tuple[Any, ...]:
    """Return a prepared ``set_parent_death_signal``."""
    return prepare_call(_NR_PRCTL, _PR_SET_PDEATHSIG, signal, 0, 0, 0)


def own_first_page(start: int, length: int, *, is_code: bool) -> None:
    """Write the first byte of a private file mapping as it is, so that the page becomes our own."""
    protection = _PROT_READ | (_PROT_EXEC if is_code else 0)
    syscall(_NR_MPROTECT, start, length, protection | _PROT_WRITE)
    ctypes.memmove(start, ctypes.string_at(start, 1), 1)
    syscall(_NR_MPROTECT, start, length, protection)
