"""Messages between keeper and zygote: fixed binary records, with file descriptors."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

OP_SPAWN, OP_KILL, OP_VARIANT = 1, 2, 3
"""First byte of a request; the name of a package to load follows ``OP_VARIANT``."""
SPAWN = struct.Struct("<BIBBBId")
"""Operation, identity, mode, has_stdin, has_output, source_bytes, wall_s; ``LIMITS`` follow."""
LIMITS = struct.Struct("<IIQIIIQ")
"""cpu_s, mem_mb, disk_bytes, inodes, nproc, nofile, file_bytes."""
KILL = struct.Struct("<BI")
"""Operation, identity."""
EXIT = struct.Struct("<IiddId?")
"""The fields of ``Exit``; the text of ``failure`` follows."""
LONGEST_WAIT = 4
"""Wall limits after which a program is ended though it waits for a busy CPU."""
COMPILE_STATUS = 77
"""Exit status of a script that does not compile."""


class Mode(IntEnum):
    """What the new process runs."""

    script = 0
    """The program, as ``__main__``."""
    candidate = 1
    """The program, as a module that answers calls."""
    tester = 2
    """The tests."""


class Exit(NamedTuple):
    """The end of one execution, as the zygote reports it: status, seconds, memory."""

    identity: int
    status: int
    """Exit status, as ``wait4`` gives it."""
    wall_s: float
    cpu_s: float
    peak_kb: int
    starved_s: float
    timed_out: bool
    failure: str
    """Why the process could not be set up; empty when it was."""
