"""Cores and memory that this process may use: in a container less than the machine has.

Source: Linux ``Documentation/admin-guide/cgroup-v2.rst``, "CPU Interface Files" and "Memory Interface Files";
``cgroup-v1/memory.rst``; ``scheduler/sched-bwc.rst``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cores(groups: Path = _GROUPS, own: Path = _OWN_GROUPS) -> int:
    """Return how many cores this process may use: its affinity or its container's quota, the lower of both.

    A quota (``--cpus 1.5`` of a container, a CPU limit of Kubernetes) is rounded up.

    Args:
        groups: where the control groups are mounted.
        own: the file that names those of this process.
    """
    cores = float(_affinity())
    for group in _groups_of("cpu", groups, own):
        quota, *period = _numbers(group / "cpu.max") or _numbers(group / "cpu.cfs_quota_us") or [math.inf]
        period = period or _numbers(group / "cpu.cfs_period_us")
        if math.isfinite(quota):
            cores = min(cores, quota / period[0])
    return max(1, math.ceil(cores))


def limit_threads(number: int) -> None:
    """Give torch ``number`` threads; 0 = its own choice, at most that of ``thread_limit``."""
    import torch

    if number or thread_limit():
        torch.set_num_threads(number or min(torch.get_num_threads(), usable_cores()))


def thread_limit() -> dict[str, str]:
    """Return ``OMP_NUM_THREADS`` for the environment of a new process; empty without a quota.

    Torch takes a thread for each core of the affinity and does not see a container's quota. Threads that wait
    for each other use the quota up, and the kernel then stops them all for most of the time. Empty, too, if
    the user has set the variable.
    """
    cores = usable_cores()
    return {} if "OMP_NUM_THREADS" in os.environ or cores == _affinity() else {"OMP_NUM_THREADS": str(cores)}


def usable_memory(groups: Path = _GROUPS, own: Path = _OWN_GROUPS) -> float:
    """Return how many bytes are free without swapping: on the machine or in the container, the lower of both.

    Files that the kernel keeps in memory and can drop count as free. Arguments as of ``usable_cores``.
    """
    import psutil  # the sandbox, which asks for cores, needs no package

    free = float(psutil.virtual_memory().available)
    for group in _groups_of("memory", groups, own):
        limit, used, cached = group / "memory.max", group / "memory.current", "inactive_file"
        if not limit.exists():
            limit, used = group / "memory.limit_in_bytes", group / "memory.usage_in_bytes"
            cached = "total_inactive_file"
        if limit.exists():
            dropped = dict(line.split() for line in _text(group / "memory.stat").splitlines())
            left = _numbers(limit)[0] - _numbers(used)[0] + float(dropped.get(cached, 0))
            free = min(free, max(0.0, left))
    return free


def proc_value(file: str, name: str) -> str:
    """Return what follows ``name`` in the first line of ``file`` that begins with it; "" if there is none.

    ``file`` is one of ``/proc``, such as ``/proc/meminfo`` with its line ``MemTotal: 24 kB``. Other systems
    than Linux have no such file.
    """
    with suppress(OSError), open(file, encoding="utf-8", errors="replace") as lines:
        return next((line.removeprefix(name).strip(": \t\n") for line in lines if line.startswith(name)), "")
    return ""


def _affinity() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def _groups_of(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """Yield the directories of this process's control groups, from the innermost to the root.

    They are those of version 2 and those of ``controller`` in version 1. Some do not exist: a container often
    reads the path of its group on the host, where only the group itself is mounted, as the root.
    """
    for line in _text(own).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        parts = [] if ".." in path else path.strip("/").split("/")
        for root in [groups / controller] if controllers else [groups, groups / "unified"]:
            for length in range(len(parts), -1, -1):
                yield root.joinpath(*parts[:length])


def _numbers(file: Path) -> list[float]:
    """Return the numbers of a file of one line; infinity for ``max`` and -1; nothing without the file."""
    return [math.inf if word in ("max", "-1") else float(word) for word in _text(file).split()]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
