"""What monitor and zygote say to each other: fixed binary messages, descriptors beside them."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "Exit",
    "Mode",
    "Spawn",
    "pack_exit",
    "pack_kill",
    "pack_spawn",
    "pack_variant",
    "unpack_exit",
    "unpack_request",
]

_SPAWN = struct.Struct("<BIBBBIdIIQIIIQ")
_KILL = struct.Struct("<BI")
_EXIT = struct.Struct("<IiddIdB")
_OP_SPAWN, _OP_KILL, _OP_VARIANT = 1, 2, 3


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

    @property
    def mount_options(self) -> bytes:
        """Options of the private file system."""
        return b"mode=0700,size=%d,nr_inodes=%d" % (self.disk_bytes, self.inodes)


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
    return _SPAWN.pack(
        _OP_SPAWN,
        spawn.identity,
        spawn.mode,
        spawn.has_stdin,
        spawn.has_output,
        spawn.source_bytes,
        spawn.wall_s,
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
    return _KILL.pack(_OP_KILL, identity)


def pack_variant(modules: list[str]) -> bytes:
    """Return the request to fork a zygote with these modules loaded too."""
    return bytes([_OP_VARIANT]) + json.dumps(modules).encode()


def unpack_request(data: bytes) -> Spawn | int | list[str]:
    """Return a ``Spawn``, the identity to kill, or the modules of a new zygote."""
    if data[0] == _OP_SPAWN:
        _, identity, mode, has_stdin, has_output, *rest = _SPAWN.unpack(data)
        return Spawn(identity, Mode(mode), bool(has_stdin), bool(has_output), *rest)
    if data[0] == _OP_KILL:
        identity = _KILL.unpack(data)[1]
        return int(identity)
    modules: list[str] = json.loads(data[1:])
    return modules


def pack_exit(
    identity: int,
    status: int,
    wall_s: float,
    cpu_s: float,
    peak_kb: int,
    starved_s: float,
    *,
    timed_out: bool = False,
    failure: str = "",
) -> bytes:
    """Return the report of an execution's end."""
    return _EXIT.pack(identity, status, wall_s, cpu_s, peak_kb, starved_s, timed_out) + failure.encode()


def unpack_exit(data: bytes) -> Exit:
    """Return the report in ``data``."""
    head, failure = data[: _EXIT.size], data[_EXIT.size :].decode("utf-8", "replace")
    identity, status, wall_s, cpu_s, peak_kb, starved_s, timed_out = _EXIT.unpack(head)
    return Exit(identity, status, wall_s, cpu_s, peak_kb, starved_s, bool(timed_out), failure)
