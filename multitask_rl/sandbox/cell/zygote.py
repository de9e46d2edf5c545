"""The cell's parent process: it forks one process per execution, kills it in time and reports its end.

It is process 1 of the cell and has one thread. It never reads sources, tests or inputs of a program; these
pass by descriptor. Modules that it imports are loaded in every program.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import os
import resource
import select
import signal
import site
import socket
import struct
import sys
import time
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

from . import landlock, linux, programs, seccomp, warm
from .rooms import Room, Rooms
from .wire import EXIT, KILL, LIMITS, LONGEST_WAIT, OP_SPAWN, OP_VARIANT, SPAWN

_PRELOAD = (
    "abc array asyncio bisect builtins calendar cmath collections collections.abc contextlib copy "
    "dataclasses datetime decimal enum fractions functools hashlib heapq inspect io itertools json "
    "logging math numbers operator queue random re statistics string struct textwrap threading time "
    "traceback types typing unicodedata unittest warnings"
)
_OWN_PROCESSES = 8
"""Processes of the cell besides a program: zygotes and the other process of a function task."""
_FIRST_OWN_FD = 100
_HOT_LIBRARIES = (b"libpython", b"libc.so", b"libc-")
_MAX_PLANS = 256
_LONG_SHARE = 0.1
"""Share of its wall limit after which a program's wait for a CPU is looked up."""
_Plan = tuple[bytes, tuple[tuple[Any, ...], ...]]
"""For given limits: mount options of /tmp, and the system calls that confine a process, the filter last."""
_DESCRIPTORS = {4 * n: struct.Struct(f"{n}i").unpack for n in range(1, 9)}
"""By their bytes in a message; prepared, so that the zygote touches fewer pages per program."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(8 * 4)
_PAGE_MB = resource.getpagesize() / (1 << 20)


def main(control: int, proc: int, host: dict[str, Any] | None = None) -> NoReturn:
    """Serve the keeper on the socket ``control`` until it closes.

    ``proc`` is a descriptor of the cell's /proc, or -1. ``host``, without namespaces, has the readable paths
    of the host: ``readable``, ``listed``, ``devices``, ``packages``.
    """
    linux.set_parent_death_signal(signal.SIGKILL)
    linux.set_no_new_privs()
    with contextlib.suppress(PermissionError):  # bubblewrap has done it
        os.setsid()
    zygote = Zygote(control, proc, _move_up(warm.warm_source()), is_flat=host is not None)
    if host is not None:
        sys.meta_path.append(_PackageFinder(host["packages"]))
    zygote.preload(_PRELOAD.split())
    if host is not None:
        landlock.restrict_to(host["readable"], host["devices"], host["listed"])
    seccomp.install(seccomp.zygote_filter())
    zygote.serve()


class _PackageFinder:
    """Finds chosen packages where the path has no directory of them alone."""

    def __init__(self, packages: list[str]) -> None:
        self._packages = {os.path.basename(path): path for path in packages}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the specification of one of the packages."""
        directory = self._packages.get(name)
        file = f"{directory}/__init__.py"
        if directory is None or not os.path.isfile(file):
            return None
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[directory])


@dataclass(slots=True)
class _Running:
    identity: int
    pid: int
    pidfd: int
    room: Room | None
    wall_s: float
    started: float
    deadline: float
    granted: float = 0.0
    timed_out: bool = False


class Zygote:
    """The parent process of all programs in one cell."""

    def __init__(self, control: int, proc: int, warm_source: int, *, is_flat: bool) -> None:
        self._warm_source = warm_source
        self._is_flat = is_flat
        self._control = socket.socket(fileno=_move_up(control))
        self._proc = _move_up(proc) if proc >= 0 else -1
        self._failures, self._report = map(_move_up, os.pipe())
        os.set_blocking(self._failures, False)
        self._running: dict[int, _Running] = {}
        self._poll = select.poll()
        self._poll.register(self._control, select.POLLIN)
        self._own_mb = self._own_kb = 0
        self._rooms = None if is_flat else Rooms()
        self._plans: dict[bytes, _Plan] = {}
        self._filter = seccomp.prepare(seccomp.program_filter())
        self._pidfd = ctypes.c_int()
        self._clone = linux.prepare_clone(0 if is_flat else linux.CLONE_NEWPID, self._pidfd)
        os.chdir("/")

    def preload(self, names: list[str]) -> None:
        """Import modules for all programs, then freeze the heap: no collection touches its pages any more."""
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        site.setquit()
        sys.argv = ["main.py"]
        sys.path_importer_cache.clear()
        for name in ("LD_LIBRARY_PATH", "LD_BIND_NOW"):
            os.environ.pop(name, None)
        warm.warm_up(self._warm_source)
        # The kernel copies page tables on a fork only for mappings that hold a page of our own; otherwise
        # every program faults in the code of the interpreter again. So each mapping of the interpreter and of
        # libc gets one. Other libraries stay as they are: their tables cost a fork more than the few faults.
        maps = self._read(f"{os.getpid()}/maps") if self._proc >= 0 else b""
        for line in maps.splitlines():
            fields = line.split()
            is_hot = len(fields) > 5 and os.path.basename(fields[5]).startswith(_HOT_LIBRARIES)
            if is_hot and fields[1] in (b"r-xp", b"r--p"):
                start, end = (int(part, 16) for part in fields[0].split(b"-"))
                linux.own_first_page(start, end - start, is_code=fields[1] == b"r-xp")
        gc.collect()
        gc.freeze()
        gc.disable()
        for limit in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
            resource.setrlimit(limit, (0, 0))
        self._own_mb = 256
        if self._proc >= 0:
            self._own_mb = int(int(self._read(f"{os.getpid()}/statm").split()[0]) * _PAGE_MB) + 1
        pid = linux.clone()  # a child's resident set before it does anything: a fork copies a part of ours
        if pid == 0:
            os._exit(0)
        self._own_kb = os.wait4(pid, 0)[2].ru_maxrss

    def serve(self) -> NoReturn:
        """Answer the keeper until it is gone; every process below dies with this one."""
        running, control_fd = self._running, self._control.fileno()
        while True:
            if not running:
                self._handle_request()
                continue
            patience = min([r.deadline for r in running.values()]) - time.monotonic()
            events = self._poll.poll(int(patience * 1000) + 1 if patience > 0 else 0)
            for descriptor, _ in events:
                if descriptor == control_fd:
                    self._handle_request()
                elif descriptor in running:
                    self._finish(running.pop(descriptor))
            if events:
                continue
            now = time.monotonic()
            for late in running.values():
                if late.deadline > now or late.timed_out:
                    continue
                # A program that was ready to run but got no CPU gets that time back. It cannot feign that for
                # long: threads that wait for each other use up the CPU limit together.
                longest = (LONGEST_WAIT - 1) * late.wall_s
                owed = min(self._starved_s(late.pid), longest) - late.granted
                if owed > 0.05 * late.wall_s:
                    late.granted += owed
                    late.deadline = now + owed
                else:
                    self._kill(late)
                    late.timed_out = True
                    late.deadline = now + 3600

    def _handle_request(self) -> None:
        data, ancillary, _, _ = self._control.recvmsg(4096, _ANCILLARY_BYTES)
        if not data:
            os._exit(0)
        descriptors = _DESCRIPTORS[len(ancillary[0][2])](ancillary[0][2]) if ancillary else ()
        if data[0] == OP_SPAWN:
            self._spawn(data, descriptors)
        elif data[0] == OP_VARIANT:
            # a second zygote that has a package loaded, its own conversation and its own mounts
            if self._rooms is not None:
                self._rooms.clear()
            if linux.clone(0 if self._is_flat else linux.CLONE_NEWNS) == 0:
                for running in self._running.values():
                    os.close(running.pidfd)
                self._control.close()
                variant = Zygote(descriptors[0], self._proc, self._warm_source, is_flat=self._is_flat)
                linux.set_parent_death_signal(signal.SIGKILL)
                gc.unfreeze()
                variant.preload([data[1:].decode()])
                variant.serve()
        else:
            _, identity = KILL.unpack(data)
            for running in self._running.values():
                if running.identity == identity:
                    self._kill(running)
        for descriptor in descriptors:
            os.close(descriptor)

    def _spawn(self, data: bytes, descriptors: tuple[int, ...]) -> None:
        _, identity, mode, has_stdin, has_output, source_bytes, wall_s = SPAWN.unpack_from(data)
        limits = data[SPAWN.size :]
        options, calls = self._plans.get(limits) or self._plan(limits)
        room = None
        if self._rooms is not None:
            try:
                room = self._rooms.take(options)
            except OSError as error:
                self._report_failure(identity, str(error))
                return
            calls = room.calls + calls
        pid = linux.raw_syscall(*self._clone)
        if pid == 0:
            if self._is_flat:
                calls = (*calls[:-1], seccomp.prepare(seccomp.program_filter(os.getpid())))
            programs.enter(
                descriptors, mode, has_stdin, has_output, source_bytes, calls, self._report, os._exit
            )
        if pid < 0:
            self._report_failure(identity, f"clone: {os.strerror(ctypes.get_errno())}")
            if self._rooms is not None and room is not None:
                self._rooms.give_back(room)
            return
        pidfd, now = self._pidfd.value, time.monotonic()
        self._running[pidfd] = _Running(identity, pid, pidfd, room, wall_s, now, now + wall_s)
        self._poll.register(pidfd, select.POLLIN)

    def _report_failure(self, identity: int, message: str) -> None:
        self._control.send(EXIT.pack(identity, 0, 0.0, 0.0, 0, 0.0, False) + message.encode())

    def _plan(self, limits: bytes) -> _Plan:
        cpu_s, mem_mb, disk_bytes, inodes, nproc, nofile, file_bytes = LIMITS.unpack(limits)
        memory = (self._own_mb + mem_mb) << 20
        # soft = hard: the first process of a pid namespace would ignore the soft limit's SIGXCPU
        values = {
            resource.RLIMIT_CPU: cpu_s,
            resource.RLIMIT_AS: memory,
            resource.RLIMIT_FSIZE: file_bytes,
            resource.RLIMIT_NOFILE: nofile,
            resource.RLIMIT_NPROC: nproc + _OWN_PROCESSES,
        }
        # kill(0) reaches a process group across pid namespaces. A session would do as well, but costs more:
        # the kernel gives each one a scheduling group
        calls = [linux.prepare_call(linux.NR_SETPGID, 0, 0)]
        if self._is_flat:  # no namespace would take it down with us
            death = linux.prepare_call(linux.NR_PRCTL, linux.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            calls = [linux.prepare_call(linux.NR_SETSID), death]
        for which, value in values.items():
            both = struct.pack("=QQ", value, value)
            calls.append(linux.prepare_call(linux.NR_PRLIMIT64, 0, which, both, None))
        # ambient capabilities fall with the permitted set
        calls.append(linux.prepare_call(linux.NR_CAPSET, linux.CAPABILITY_HEADER, linux.NO_CAPABILITIES))
        plan = b"mode=0700,size=%d,nr_inodes=%d" % (disk_bytes, inodes), (*calls, self._filter)
        if len(self._plans) > _MAX_PLANS:
            self._plans.clear()
        self._plans[limits] = plan
        return plan

    def _finish(self, running: _Running) -> None:
        self._poll.unregister(running.pidfd)
        os.close(running.pidfd)
        wall_s = time.monotonic() - running.started
        starved_s = running.granted
        if wall_s > _LONG_SHARE * running.wall_s:
            starved_s = max(starved_s, self._starved_s(running.pid))
        _, status, usage = os.wait4(running.pid, 0)
        failure = ""
        if status:
            with contextlib.suppress(BlockingIOError):
                failure = os.read(self._failures, 4096).decode("utf-8", "replace")
        cpu_s, peak_kb = usage[0] + usage[1], max(0, usage[2] - self._own_kb)
        report = EXIT.pack(running.identity, status, wall_s, cpu_s, peak_kb, starved_s, running.timed_out)
        self._control.send(report + failure.encode())
        if self._rooms is not None and running.room is not None:
            self._rooms.give_back(running.room)

    def _kill(self, running: _Running) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(running.pidfd, signal.SIGKILL)

    def _starved_s(self, pid: int) -> float:
        """Return the longest wait of a thread of the process for a CPU, as the kernel counts."""
        if self._proc < 0:
            return 0.0
        total = 0
        with contextlib.suppress(OSError, ValueError):
            tasks = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
            try:
                for task in os.listdir(tasks):
                    total = max(total, int(self._read(f"{task}/schedstat", tasks).split()[1]))
            finally:
                os.close(tasks)
        return total / 1e9

    def _read(self, path: str, directory: int = -1) -> bytes:
        """Return the content of a file below ``directory``, else below the cell's /proc."""
        descriptor = os.open(path, os.O_RDONLY, dir_fd=directory if directory >= 0 else self._proc)
        with open(descriptor, "rb") as file:
            return file.read()


def _move_up(descriptor: int) -> int:
    """Return a copy far above the descriptors of a program."""
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FD)
    os.close(descriptor)
    return copy
