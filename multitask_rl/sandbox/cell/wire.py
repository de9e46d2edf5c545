"""Messages between monitor and zygote: fixed binary records, with file descriptors."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "COMPILE_STATUS",
    "LIMITS",
    "LONGEST_WAIT",
    "OP_SPAWN",
    "OP_VARIANT",
    "SPAWN",
    "Exit",
    "Mode",
    "Spawn",
    "pack_exit",
    "pack_kill",
    "pack_spawn",
    "pack_variant",
    "unpack_exit",
    "unpack_kill",
]

SPAWN = struct.Struct("<BIBBBId")
"""Operation, identity, mode, has_stdin, has_output, source_bytes, wall_s; ``LIMITS`` follow."""
LIMITS = struct.Struct("<IIQIIIQ")
"""cpu_s, mem_mb, disk_bytes, inodes, nproc, nofile, file_bytes."""
LONGEST_WAIT = 4
"""Wall limits after which a program is ended though it did not get the CPU it was ready to use."""
COMPILE_STATUS = 77
"""Exit status of a script that does not compile."""
_KILL = struct.Struct("<BI")
_EXIT = struct.Struct("<IiddIdB")
OP_SPAWN, OP_KILL, OP_VARIANT = 1, 2, 3


class Mode(IntEnum):
    """What the new process is to be."""

    script = 0
    """The program, run as ``__main__``."""
    candidate = 1
    """The program as a module that answers calls."""
    judge = 2
    """The tests."""


@dataclass(slots=True)
class Spawn:
    """One execution."""

    identity: int
    mode: Mode
    has_stdin: bool
    has_output: bool
    source_bytes: int
    wall_s: float
    cpu_s: int
    mem_mb: int
    disk_bytes: int
    inodes: int
    nproc: int
    nofile: int
    file_bytes: int


@dataclass(slots=True)
class Exit:
    """How one execution ended."""

    identity: int
    status: int
    """As ``wait4`` gives it."""
    wall_s: float
    cpu_s: float
    peak_kb: int
    starved_s: float
    timed_out: bool
    failure: str
    """Why the process could not be set up; empty when it was."""


def pack_spawn(spawn: Spawn) -> bytes:
    """Return the request to start an execution."""
    head = SPAWN.pack(
        OP_SPAWN,
        spawn.identity,
        spawn.mode,
        spawn.has_stdin,
        spawn.has_output,
        spawn.source_bytes,
        spawn.wall_s,
    )
    return head + LIMITS.pack(
        spawn.cpu_s,
        spawn.mem_mb,
        spawn.disk_bytes,
        spawn.inodes,
        spawn.nproc,
        spawn.nofile,
        spawn.file_bytes,
    )


def pack_kill(identity: int) -> bytes:
    """Return the request to kill an execution."""
    return _KILL.pack(OP_KILL, identity)


def pack_variant(modules: list[str]) -> bytes:
    """Return the request to fork a zygote with these modules loaded too."""
    return bytes([OP_VARIANT]) + json.dumps(modules).encode()


def unpack_kill(data: bytes) -> int:
    """Return the identity a request to kill names."""
    identity: int = _KILL.unpack(data)[1]
    return identity


def pack_exit(
    identity: int,
    status: int,
    wall_s: float,
    cpu_s: float,
    peak_kb: int,
    starved_s: float,
    timed_out: bool,
    failure: str,
) -> bytes:
    """Return the report of an execution's end."""
    return _EXIT.pack(identity, status, wall_s, cpu_s, peak_kb, starved_s, timed_out) + failure.encode()


def unpack_exit(data: bytes) -> Exit:
    """Return the report in ``data``."""
    head, failure = data[: _EXIT.size], data[_EXIT.size :].decode("utf-8", "replace")
    identity, status, wall_s, cpu_s, peak_kb, starved_s, timed_out = _EXIT.unpack(head)
    return Exit(identity, status, wall_s, cpu_s, peak_kb, starved_s, bool(timed_out), failure)
