"""Limits of memory and processes for a whole cell, where cgroup v2 controllers are delegated to this process.

Each program has limits of its own. A cgroup adds what those do not count: kernel memory, pipes, and both
processes of a function task together.
Source: Linux ``Documentation/admin-guide/cgroup-v2.rst``, "Delegation", "No Internal Process Constraint".
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path

from multitask_rl.errors import SandboxError
from multitask_rl.sandbox.base import Limits

_NEEDED = ("memory", "pids")
_PREFIX = "multitask-rl-"
_BASE_MB = 256
"""Memory for the zygotes, in MB."""
_TESTER_MB = 512
_OWN_PROCESSES = 16
_REMOVAL_S = 2.0


def delegated_cgroup(directory: str | None = None) -> tuple[Path | None, str]:
    """Return a cgroup v2 directory for cells, by default this process's own; or None and what is missing."""
    path = Path(directory) if directory is not None else None
    if path is None:
        with contextlib.suppress(OSError):
            groups = Path("/proc/self/cgroup").read_text().splitlines()
            own = next((line[3:] for line in groups if line.startswith("0::")), None)
            for line in Path("/proc/self/mountinfo").read_text().splitlines():
                fields, _, kind = line.partition(" - ")
                if own is not None and kind.startswith("cgroup2 "):
                    root, mount_point = fields.split()[3:5]
                    relative = os.path.relpath(own, root)
                    if not relative.startswith(".."):
                        path = Path(mount_point, relative)
                    break
    if path is None:
        return None, "no cgroup v2 hierarchy is mounted"
    try:
        offered = (path / "cgroup.controllers").read_text().split()
        enabled = (path / "cgroup.subtree_control").read_text().split()
        if missing := [name for name in _NEEDED if name not in offered]:
            return None, f"{path} has no {' and no '.join(missing)} controller"
        if not os.access(path, os.W_OK):
            return None, f"{path} is not delegated to this user"
        if wanted := [f"+{name}" for name in _NEEDED if name not in enabled]:
            (path / "cgroup.subtree_control").write_text(" ".join(wanted))
    except OSError as error:
        return None, f"{path}: {error.strerror} (a cgroup that holds processes cannot limit those below it)"
    return path, ""


class CellCgroup:
    """The cgroup of one worker's cell, below a delegated one; its limits grow with those of the programs."""

    def __init__(self, parent: Path, worker: int) -> None:
        self.path = parent / f"{_PREFIX}{os.getpid()}-{worker}"
        self._limits: dict[str, int] = {}
        for path in parent.glob(f"{_PREFIX}*-*"):  # a cgroup outlives the crash of its owner
            owner = path.name.removeprefix(_PREFIX).partition("-")[0]
            if not os.path.exists(f"/proc/{owner}"):
                with contextlib.suppress(OSError):
                    path.rmdir()
        try:
            self.path.mkdir(exist_ok=True)
            self.allow(Limits())
        except OSError as error:
            raise SandboxError(f"cannot limit a sandbox cell in {self.path}: {error}") from error

    def allow(self, limits: Limits) -> None:
        """Raise the cgroup's limits to what a program with ``limits`` needs; they are never lowered."""
        memory_mb = _BASE_MB + _TESTER_MB + limits.mem_mb + 2 * limits.disk_mb
        processes = _OWN_PROCESSES + 2 * limits.nproc
        for name, limit in (("memory.max", memory_mb << 20), ("pids.max", processes)):
            if limit > self._limits.get(name, 0):
                self._limits[name] = limit
                (self.path / name).write_text(str(limit))

    def take(self, processes: Iterable[int]) -> None:
        """Move processes (by id) into the cgroup; their later children are in it, too."""
        for pid in processes:
            (self.path / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Kill the processes inside and remove the directory."""
        with contextlib.suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + _REMOVAL_S
        while time.monotonic() < deadline:
            try:
                self.path.rmdir()
            except OSError as error:
                if error.errno != errno.EBUSY:  # killed processes take a moment to leave
                    return
                time.sleep(0.02)
            else:
                return


def descendants(root: int) -> set[int]:
    """Return the ids of the processes that descend from the process ``root``.

    It reads ``/proc`` itself: the pool imports the standard library alone, so that an interpreter without the
    packages of this project can run it.
    """
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(directory.name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found
