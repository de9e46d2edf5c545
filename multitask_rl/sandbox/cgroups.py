"""A memory and process limit around a whole cell, where cgroup v2 controllers are delegated to this process.

Without them each program still has its own limits (RLIMIT_AS, RLIMIT_NPROC, the size of its file system); a
cgroup adds what those do not count: kernel memory, pipes, and both halves of a function task together.
Source: Linux ``Documentation/admin-guide/cgroup-v2.rst``, "Delegation" and "No Internal Process Constraint".
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

__all__ = ["CellCgroup", "delegated_cgroup"]

_NEEDED = ("memory", "pids")
_PREFIX = "multitask-rl-"
_BASE_MB = 256
"""The zygotes themselves."""
_JUDGE_MB = 512
_SETTLED_PROCESSES = 16
_REMOVAL_S = 2.0


def delegated_cgroup(directory: str | None = None) -> tuple[Path | None, str]:
    """Return a cgroup in which cells can be limited, or None and what is missing.

    Args:
        directory: a cgroup v2 directory; None = the one this process is in.
    """
    path = Path(directory) if directory is not None else _own_cgroup()
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


def _own_cgroup() -> Path | None:
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    own = next((line[3:] for line in groups if line.startswith("0::")), None)
    for line in mounts:
        fields, _, kind = line.partition(" - ")
        if own is not None and kind.startswith("cgroup2 "):
            root, mount_point = fields.split()[3:5]
            relative = os.path.relpath(own, root)
            return None if relative.startswith("..") else Path(mount_point, relative)
    return None


class CellCgroup:
    """The cgroup of one worker's cell; its limits grow with what the programs are allowed.

    Args:
        parent: what ``delegated_cgroup`` returned.
        worker: number of the worker.

    Raises:
        SandboxError: the directory cannot be made.
    """

    def __init__(self, parent: Path, worker: int) -> None:
        self.path = parent / f"{_PREFIX}{os.getpid()}-{worker}"
        self._memory_mb = self._processes = 0
        _sweep(parent)
        try:
            self.path.mkdir(exist_ok=True)
            self.allow(Limits())
        except OSError as error:
            raise SandboxError(f"cannot limit a sandbox cell in {self.path}: {error}") from error

    def allow(self, limits: Limits) -> None:
        """Make room for a program with these limits."""
        memory_mb = _BASE_MB + _JUDGE_MB + limits.mem_mb + 2 * limits.disk_mb
        if memory_mb > self._memory_mb:
            self._memory_mb = memory_mb
            self._write("memory.max", str(memory_mb << 20))
        processes = _SETTLED_PROCESSES + 2 * limits.nproc
        if processes > self._processes:
            self._processes = processes
            self._write("pids.max", str(processes))

    def take(self, processes: Iterable[int]) -> None:
        """Put processes under the limits; what they start follows."""
        for pid in processes:
            self._write("cgroup.procs", str(pid))

    def close(self) -> None:
        """Kill what is left inside and remove the directory."""
        with contextlib.suppress(OSError):
            self._write("cgroup.kill", "1")
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

    def _write(self, name: str, value: str) -> None:
        (self.path / name).write_text(value)


def _sweep(parent: Path) -> None:
    """Remove what processes that are dead left: a cgroup outlives the crash of its owner."""
    for path in parent.glob(f"{_PREFIX}*-*"):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not os.path.exists(f"/proc/{owner}"):
            with contextlib.suppress(OSError):
                path.rmdir()
