"""The system call filter: an allow list, searched as a tree, in two stages.

Stage one, installed once in the zygote, is inherited by every program: it allows the calls of programs and of
the zygote. Stage two takes away the zygote's own. It is short, because every program pays for loading it: one
run of the filter per system call number, hence the tree, too. Source of the numbers: Linux
``arch/x86/entry/syscalls/syscall_64.tbl``.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

from .linux import prepare_call, raise_errno, raw_syscall

_ALLOW, _KILL_PROCESS = 0x7FFF0000, 0x80000000
_EPERM, _ENOSYS, _ENOTTY = 0x00050001, 0x00050026, 0x00050019
_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENT_AT = 0, 4, 16
_ARCH_X86_64, _X32_BIT = 0xC000003E, 0x40000000
_CLONE_THREAD = 0x00010000
_CLONE_PIDFD_OR_NAMESPACE = 0x7E021000
_SET_MODE_FILTER = 1
_LAST_KNOWN = 462

_FILES = [
    *range(0, 9), *range(17, 23), 32, 33, 40, *range(74, 94), 94, 95, 137, 138, 187,
    191, 192, 193, 194, 195, 196, 217, 221, 235, 257, 258, *range(260, 270), 275, 276, 277, 280, 285, 295,
    296, 316, 326, 327, 328, 332, 436, 437, 439, 452,
]  # fmt: skip
_MEMORY = [9, 10, 11, 12, 25, 26, 27, 28]
_SIGNALS = [13, 14, 15, 34, 62, 127, 128, 130, 131, 200, 234]
_TIME = [35, 36, 37, 38, 96, 100, 201, 228, 229, 230, 283, 286, 287]
_PROCESS = [
    24, 39, 60, 61, 63, 97, 98, 99, 102, 104, 107, 108, 110, 111, 112, 115, 118, 120, 121, 124, 125, 126, 140,
    143, 145, 146, 147, 148, 157, 158, 160, 186, 202, 204, 218, 219, 231, 247, 273, 274, 302, 309, 318, 334,
    449,
]  # fmt: skip
_WAITING = [7, 23, 213, 232, 233, 270, 271, 281, 284, 290, 291, 292, 293, 441]
# no socket(): a pair is connected to itself only (asyncio needs one). No setsockopt: buffers keep their size
_SOCKET_PAIRS = [44, 45, 47, 48, 51, 52, 53, 55]
_ALLOWED = sorted({*_FILES, *_MEMORY, *_SIGNALS, *_TIME, *_PROCESS, *_WAITING, *_SOCKET_PAIRS})
_CLONE, _CLONE3, _IOCTL, _FCNTL, _GETSOCKOPT, _SENDMSG = 56, 435, 16, 72, 55, 46
_MOUNT, _UMOUNT2, _SECCOMP, _PIDFD_OPEN, _PIDFD_SEND_SIGNAL = 165, 166, 317, 434, 424
_PRCTL, _SETPGID, _CHROOT = 157, 109, 161
_NAMES_A_PROCESS = [62, 200, 234, 302]
"""kill, tkill, tgkill, prlimit64"""
_PRCTL_COMMANDS = [3, 15, 16, 21, 39]
"""Names and questions; not the signal at the parent's death, which ends a program whose sandbox died."""
_PR_SET_PDEATHSIG = 1
_SOCKET_OPTIONS = [3, 4, 7, 8, 38, 39]
"""Type, error, buffer sizes, protocol, family; no handle of the process at the other end."""
_CHANGES_METADATA = [90, 91, 92, 93, 94, 132, 235, 260, 261, 268, 280, 452]
"""chmod, chown, utime and their kin: Landlock has no say in them, so an owner could change his files."""
_ZYGOTE_ONLY = [_SETPGID, _CHROOT, _MOUNT, _UMOUNT2, _SECCOMP, _PIDFD_SEND_SIGNAL, _PIDFD_OPEN]
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: nothing that pushes input or sets file flags
_IOCTL_COMMANDS = [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]
# duplicate, descriptor and status flags, POSIX and OFD locks, pipe sizes, get seals; no leases, no signals
_FCNTL_COMMANDS = [0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032, 1034]

_ADD_SEALS = 1033
# read, write, close, fstat, poll, seek, signals' return, pread, pwrite, nap, pid, socket messages, shutdown,
# socketpair, exit, futex, restart, clocks, tgkill (abort), random, memfd_create
_KEEPER = [
    0, 1, 3, 5, 7, 8, 13, 14, 15, 17, 18, 24, 35, 39, 44, 45, 46, 47, 48, 53, 60, 63, 131, 186, 202, 219, 228,
    230, 231, 234, 262, 271, 273, 318, 319, 334,
]  # fmt: skip

Instruction = tuple[int, int, int, int]


def _ret(action: int) -> Instruction:
    return (_RETURN, 0, 0, action)


def _argument_in(position: int, values: Sequence[int], otherwise: int) -> list[Instruction]:
    """Allow when argument ``position`` is one of ``values`` (its low half: the kernel reads no more)."""
    tests = [(_JUMP_EQ, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [(_LOAD, 0, 0, _ARGUMENT_AT + 8 * position), *tests, _ret(otherwise), _ret(_ALLOW)]


def _tree(leaves: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """Return the search for the last leaf whose first number is <= the one loaded."""
    if len(leaves) == 1:
        return leaves[0][1]
    middle = len(leaves) // 2
    low, high = _tree(leaves[:middle]), _tree(leaves[middle:])
    if len(low) > 255:
        raise AssertionError("the filter outgrew the 8-bit jumps of BPF")
    return [(_JUMP_GE, len(low), 0, leaves[middle][0]), *low, *high]


def _assemble(instructions: Sequence[Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def zygote_filter() -> bytes:
    """Return the filter of stage one: what programs and the zygote may call.

    Other calls fail with an error (EPERM; ENOSYS for newer calls). ``sendmsg`` and the calls of another
    architecture end the process.
    """
    special: dict[int, list[Instruction]] = {
        _IOCTL: _argument_in(1, _IOCTL_COMMANDS, _ENOTTY),
        _FCNTL: _argument_in(1, _FCNTL_COMMANDS, _EPERM),
        _PRCTL: _argument_in(0, [*_PRCTL_COMMANDS, _PR_SET_PDEATHSIG], _EPERM),
        # a descriptor that is under way in a socket outlives its program and counts for no limit
        _SENDMSG: [_ret(_KILL_PROCESS)],
        _GETSOCKOPT: _argument_in(2, _SOCKET_OPTIONS, _EPERM),
        # its flags are in memory, out of a filter's sight; glibc falls back to clone
        _CLONE3: [_ret(_ENOSYS)],
    }
    return _allow_list({*_ALLOWED, *_ZYGOTE_ONLY, _CLONE}, special)


def keeper_filter() -> bytes:
    """Return what a keeper may call once its cell is up: no file, no process, no socket but pairs."""
    special = {_FCNTL: _argument_in(1, [*_FCNTL_COMMANDS, _ADD_SEALS], _EPERM)}
    return _allow_list({*_MEMORY, *_KEEPER}, special)


def _allow_list(allowed: set[int], special: dict[int, list[Instruction]]) -> bytes:
    leaves: list[tuple[int, list[Instruction]]] = []
    for number in range(_LAST_KNOWN + 1):
        body = special.get(number) or [_ret(_ALLOW if number in allowed else _EPERM)]
        if not leaves or leaves[-1][1] != body:
            leaves.append((number, body))
    leaves.append((_LAST_KNOWN + 1, [_ret(_ENOSYS)]))  # a newer call: let the C library try the older way
    return _assemble(
        [
            (_LOAD, 0, 0, _ARCH_AT),
            (_JUMP_EQ, 1, 0, _ARCH_X86_64),
            _ret(_KILL_PROCESS),
            (_LOAD, 0, 0, _NUMBER_AT),
            (_JUMP_GE, 0, 1, _X32_BIT),
            _ret(_KILL_PROCESS),
            *_tree(leaves),
        ]
    )


def program_filter(own_pid: int | None = None) -> bytes:
    """Return stage two: no new process, no mount, no other root, no further filter.

    Without a pid namespace, signals and limits may name the process ``own_pid`` only.
    """
    blocks: dict[int, list[Instruction]] = {number: [_ret(_EPERM)] for number in _ZYGOTE_ONLY}
    is_thread = [
        (_LOAD, 0, 0, _ARGUMENT_AT),
        (_JUMP_SET, 1, 0, _CLONE_PIDFD_OR_NAMESPACE),
        (_JUMP_SET, 1, 0, _CLONE_THREAD),
        _ret(_EPERM),
        _ret(_ALLOW),
    ]
    blocks[_CLONE] = is_thread
    if own_pid is not None:
        blocks.update({number: _argument_in(0, [0, own_pid], _EPERM) for number in _NAMES_A_PROCESS})
        blocks[_PRCTL] = _argument_in(0, _PRCTL_COMMANDS, _EPERM)
        blocks.update({number: [_ret(_EPERM)] for number in _CHANGES_METADATA})
    # layout: one test per number, allow, then the distinct blocks
    distinct: list[list[Instruction]] = []
    for block in blocks.values():
        if block not in distinct:
            distinct.append(block)
    starts = [1 + len(blocks) + 1 + sum(map(len, distinct[:i])) for i in range(len(distinct))]
    body: list[Instruction] = [(_LOAD, 0, 0, _NUMBER_AT)]
    for number, block in blocks.items():
        body.append((_JUMP_EQ, starts[distinct.index(block)] - len(body) - 1, 0, number))
    return _assemble([*body, _ret(_ALLOW), *(i for block in distinct for i in block)])


def prepare(code: bytes) -> tuple[Any, ...]:
    """Return the prepared system call that ``install`` makes."""
    block = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(block))
    program = ctypes.create_string_buffer(head, 16)
    _kept_alive.append(block)
    return prepare_call(_SECCOMP, _SET_MODE_FILTER, 0, program)


_kept_alive: list[Any] = []
"""Filters that prepared calls point to."""


def install(code: bytes) -> None:
    """Install a filter for this process and all it starts; needs ``no_new_privs`` or CAP_SYS_ADMIN."""
    if raw_syscall(*prepare(code)) == -1:
        raise_errno("seccomp")
