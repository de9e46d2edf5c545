"""The cell's parent process: forks one disposable process per execution, kills it in time, reports its end.

It is process 1 of the cell, has one thread and never reads sources, tests or inputs of a program: they pass
by descriptor. Modules that it imports are already loaded in every program.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import resource
import select
import signal
import site
import socket
import struct
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

from . import landlock, linux, programs, seccomp, warm
from .rooms import Room, Rooms
from .wire import LIMITS, LONGEST_WAIT, OP_SPAWN, OP_VARIANT, SPAWN, pack_exit, unpack_kill

__all__ = ["main"]

_PRELOAD = (
    "abc array asyncio bisect builtins calendar cmath collections collections.abc contextlib copy "
    "dataclasses datetime decimal enum fractions functools hashlib heapq inspect io itertools json "
    "logging math numbers operator queue random re statistics string struct textwrap threading time "
    "traceback types typing unicodedata unittest warnings"
)
_SETTLED_PROCESSES = 8
"""Processes of the cell that are not this program's: zygotes and the other half of a function task."""
_FIRST_OWN_FD = 100
_HOT_LIBRARIES = (b"libpython", b"libc.so", b"libc-")
_MAX_PLANS = 256
_LONG_SHARE = 0.1
"""Share of its limit that a program has to run for its waiting for a CPU to be looked up."""
_Plan = tuple[bytes, tuple[tuple[Any, ...], ...]]
"""For certain limits: mount options of /tmp, and the system calls that confine a process, the filter last."""
_DESCRIPTORS = {4 * n: struct.Struct(f"{n}i").unpack for n in range(1, 9)}
"""By the bytes they take in a message; prepared, so that the zygote touches fewer pages per program."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(8 * 4)
_PAGE_MB = resource.getpagesize() / (1 << 20)


def main(control: int, proc: int, host: dict[str, Any] | None = None) -> NoReturn:
    """Serve the monitor on the socket ``control`` until it closes.

    Args:
        control: descriptor of the conversation.
        proc: descriptor of the cell's /proc, or -1.
        host: without namespaces, what of the host may be read: ``readable``, ``listed``, ``devices``,
            ``packages``.
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
    """Finds chosen packages where no directory of only them can be put on the path."""

    def __init__(self, packages: list[str]) -> None:
        self._packages = {os.path.basename(path): path for path in packages}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the specification of one of the packages."""
        directory = self._packages.get(name)
        if directory is None or not os.path.isfile(f"{directory}/__init__.py"):
            return None
        return importlib.util.spec_from_file_location(
            name, f"{directory}/__init__.py", submodule_search_locations=[directory]
        )


class _Running:
    __slots__ = (
        "deadline", "granted", "identity", "pid", "pidfd", "room", "started", "timed_out", "wall_s"
    )  # fmt: skip

    def __init__(self, identity: int, pid: int, pidfd: int, wall_s: float, room: Room | None) -> None:
        self.identity = identity
        self.pid = pid
        self.pidfd = pidfd
        self.room = room
        self.started = now = time.monotonic()
        self.wall_s = wall_s
        self.deadline = now + wall_s
        self.granted = 0.0
        self.timed_out = False


class Zygote:
    """One cell's process parent."""

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
        self._own_mb = 0
        self._own_kb = 0
        self._rooms = None if is_flat else Rooms()
        self._plans: dict[bytes, _Plan] = {}
        self._filter = seccomp.prepare(seccomp.program_filter())
        self._pidfd = ctypes.c_int()
        self._clone = linux.clone_arguments(0 if is_flat else linux.CLONE_NEWPID, self._pidfd)
        os.chdir("/")

    def preload(self, names: list[str]) -> None:
        """Import modules for all programs, then freeze the heap so that no collection touches its pages."""
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        site.setquit()
        sys.argv = ["main.py"]
        sys.path_importer_cache.clear()
        for name in ("LD_LIBRARY_PATH", "LD_BIND_NOW"):
            os.environ.pop(name, None)
        warm.warm_up(self._warm_source)
        self._own_text()
        gc.collect()
        gc.freeze()
        gc.disable()
        for limit in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
            resource.setrlimit(limit, (0, 0))
        self._own_mb = self._address_space_mb()
        self._own_kb = _child_peak_kb()

    def _own_text(self) -> None:
        """Make the kernel copy the page tables of the interpreter and of libc on a fork.

        It does so only for mappings that hold a page of our own; otherwise every program faults in the code
        of the interpreter again. So each mapping gets one: the byte that is there is written once more.
        Other libraries stay as they are: their tables cost every fork more than the few faults they save.
        """
        if self._proc < 0:
            return
        for line in _read_all(f"{os.getpid()}/maps", self._proc).splitlines():
            fields = line.split()
            if len(fields) < 6 or fields[1] not in (b"r-xp", b"r--p"):
                continue
            if not os.path.basename(fields[5]).startswith(_HOT_LIBRARIES):
                continue
            start, end = (int(part, 16) for part in fields[0].split(b"-"))
            linux.own_first_page(start, end - start, is_code=fields[1] == b"r-xp")

    def serve(self) -> NoReturn:
        """Answer the monitor until it is gone; everything below dies with this process."""
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
            if not events:
                self._enforce_deadlines()

    def _handle_request(self) -> None:
        data, ancillary, _, _ = self._control.recvmsg(4096, _ANCILLARY_BYTES)
        if not data:
            os._exit(0)
        descriptors = _DESCRIPTORS[len(ancillary[0][2])](ancillary[0][2]) if ancillary else ()
        if data[0] == OP_SPAWN:
            self._spawn(data, descriptors)
        elif data[0] == OP_VARIANT:
            self._become_variant(json.loads(data[1:]), descriptors[0])
        else:
            for running in self._running.values():
                if running.identity == unpack_kill(data):
                    self._kill(running)
        for descriptor in descriptors:
            os.close(descriptor)

    def _become_variant(self, names: list[str], control: int) -> None:
        """Fork a second zygote that has more modules loaded, its own conversation and its own mounts."""
        if self._rooms is not None:
            self._rooms.clear()
        if linux.clone(0 if self._is_flat else linux.CLONE_NEWNS):
            return
        for running in self._running.values():
            os.close(running.pidfd)
        self._control.close()
        variant = Zygote(os.dup(control), self._proc, self._warm_source, is_flat=self._is_flat)
        os.close(control)
        linux.set_parent_death_signal(signal.SIGKILL)
        gc.unfreeze()
        variant.preload(names)
        variant.serve()

    def _spawn(self, data: bytes, descriptors: Sequence[int]) -> None:
        _, identity, mode, has_stdin, has_output, source_bytes, wall_s = SPAWN.unpack_from(data)
        limits = data[SPAWN.size :]
        options, calls = self._plans.get(limits) or self._plan(limits)
        room = None
        try:
            if self._rooms is not None:
                room = self._rooms.take(options)
                calls = room.calls + calls
        except OSError as error:
            self._report_failure(identity, str(error))
            return
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
        pidfd = self._pidfd.value
        self._running[pidfd] = _Running(identity, pid, pidfd, wall_s, room)
        self._poll.register(pidfd, select.POLLIN)

    def _report_failure(self, identity: int, message: str) -> None:
        self._control.send(pack_exit(identity, 0, 0.0, 0.0, 0, 0.0, False, message))

    def _plan(self, limits: bytes) -> _Plan:
        cpu_s, mem_mb, disk_bytes, inodes, nproc, nofile, file_bytes = LIMITS.unpack(limits)
        memory = (self._own_mb + mem_mb) << 20
        # soft = hard: the first process of a pid namespace would ignore the soft limit's SIGXCPU
        values = {
            resource.RLIMIT_CPU: cpu_s,
            resource.RLIMIT_AS: memory,
            resource.RLIMIT_FSIZE: file_bytes,
            resource.RLIMIT_NOFILE: nofile,
            resource.RLIMIT_NPROC: nproc + _SETTLED_PROCESSES,
        }
        # kill(0) reaches a process group across pid namespaces. A session would do as well, but costs more:
        # the kernel gives each one a scheduling group
        private = [linux.prepare_own_group()]
        if self._is_flat:  # no namespace would take it down with us
            private = [linux.prepare_setsid(), linux.prepare_parent_death_signal(signal.SIGKILL)]
        plan = (
            b"mode=0700,size=%d,nr_inodes=%d" % (disk_bytes, inodes),
            (
                *private,
                *(linux.prepare_limit(which, value) for which, value in values.items()),
                linux.prepare_drop_capabilities(),
                self._filter,
            ),
        )
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
        self._control.send(
            pack_exit(
                running.identity,
                status,
                wall_s,
                usage[0] + usage[1],
                max(0, usage[2] - self._own_kb),
                starved_s,
                running.timed_out,
                failure,
            )
        )
        if self._rooms is not None and running.room is not None:
            self._rooms.give_back(running.room)

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for running in self._running.values():
            if running.deadline <= now and not running.timed_out:
                # a program that was ready to run but got no CPU is given that time back; it cannot feign that
                # for long: threads that wait for each other use up the CPU limit together
                longest = (LONGEST_WAIT - 1) * running.wall_s
                owed = min(self._starved_s(running.pid), longest) - running.granted
                if owed > 0.05 * running.wall_s:
                    running.granted += owed
                    running.deadline = now + owed
                else:
                    self._kill(running)
                    running.timed_out = True
                    running.deadline = now + 3600

    def _kill(self, running: _Running) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(running.pidfd, signal.SIGKILL)

    def _starved_s(self, pid: int) -> float:
        """Return how long the threads of a process waited for a CPU, as the kernel counted."""
        if self._proc < 0:
            return 0.0
        total = 0
        with contextlib.suppress(OSError, ValueError):
            tasks = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
            try:
                for task in os.listdir(tasks):
                    total = max(total, int(_read(f"{task}/schedstat", tasks).split()[1]))
            finally:
                os.close(tasks)
        return total / 1e9

    def _address_space_mb(self) -> int:
        if self._proc < 0:
            return 256
        return int(int(_read(f"{os.getpid()}/statm", self._proc).split()[0]) * _PAGE_MB) + 1


def _child_peak_kb() -> int:
    """Return the resident set a child has before it does anything: not all of ours is copied by a fork."""
    pid = linux.fork()
    if pid == 0:
        os._exit(0)
    return os.wait4(pid, 0)[2].ru_maxrss


def _move_up(descriptor: int) -> int:
    """Return a copy far above the descriptors a program is given."""
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FD)
    os.close(descriptor)
    return copy


def _read_all(path: str, directory: int) -> bytes:
    with open(os.open(path, os.O_RDONLY, dir_fd=directory), "rb") as file:
        return file.read()


def _read(path: str, directory: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=directory)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
