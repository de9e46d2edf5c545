"""The cell's parent process: forks one disposable process per execution, kills it in time, reports its end.

It is process 1 of the cell, has one thread and never reads what a program is made of: sources, tests and
inputs pass it by descriptor. What it imports here every program gets for free.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import importlib.util
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import types
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

from . import candidate, judge, landlock, linux, seccomp
from .wire import Mode, Spawn, pack_exit, unpack_request

__all__ = ["main"]

_PRELOAD = (
    "abc array bisect builtins calendar cmath collections collections.abc contextlib copy dataclasses datetime "
    "decimal enum fractions functools hashlib heapq inspect io itertools json logging math numbers operator queue "
    "random re statistics string struct textwrap threading time traceback types typing unicodedata warnings "
    "bisect asyncio unittest"
)
_SETTLED_PROCESSES = 8
"""Processes of the cell that are not this program's: zygotes and the other half of a function task."""
_FIRST_OWN_FD = 100
_PAGE_MB = resource.getpagesize() / (1 << 20)


def main(control: int, proc: int, host: dict[str, Any] | None = None) -> NoReturn:
    """Serve the monitor on the socket ``control`` until it closes.

    Args:
        control: descriptor of the conversation.
        proc: descriptor of the cell's /proc, or -1.
        host: without namespaces, what of the host may be read: ``readable``, ``devices``, ``packages``.
    """
    linux.set_parent_death_signal(signal.SIGKILL)
    linux.set_no_new_privs()
    zygote = Zygote(control, proc, is_flat=host is not None)
    if host is not None:
        sys.meta_path.append(_PackageFinder(host["packages"]))
    zygote.preload(_PRELOAD.split())
    if host is not None:
        landlock.restrict_to(host["readable"], host["devices"])
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
    __slots__ = ("deadline", "granted", "identity", "pid", "pidfd", "started", "timed_out", "wall_s")

    def __init__(self, identity: int, pid: int, wall_s: float) -> None:
        self.identity = identity
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.started = time.monotonic()
        self.wall_s = wall_s
        self.deadline = self.started + wall_s
        self.granted = 0.0
        self.timed_out = False


class Zygote:
    """One cell's process parent."""

    def __init__(self, control: int, proc: int, *, is_flat: bool) -> None:
        self._is_flat = is_flat
        self._control = socket.socket(fileno=_move_up(control))
        self._proc = _move_up(proc) if proc >= 0 else -1
        ready_read, ready_write = os.pipe()
        self._ready_read, self._ready_write = _move_up(ready_read), _move_up(ready_write)
        os.set_blocking(self._ready_read, False)
        self._ready: set[int] = set()
        self._running: dict[int, _Running] = {}
        self._poll = select.poll()
        self._poll.register(self._control, select.POLLIN)
        self._tid_at = linux.tid_address()
        self._program_filter = seccomp.program_filter()
        self._own_mb = 0
        self._own_kb = 0
        os.chdir("/" if is_flat else "/tmp")

    def preload(self, names: list[str]) -> None:
        """Import modules for all programs, then freeze the heap so that no collection touches its pages."""
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        import site

        site.setquit()
        sys.argv = ["main.py"]
        sys.path_importer_cache.clear()
        for name in ("LD_LIBRARY_PATH",):
            os.environ.pop(name, None)
        gc.collect()
        gc.freeze()
        gc.disable()
        self._own_mb = self._address_space_mb()
        self._own_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def serve(self) -> NoReturn:
        """Answer the monitor until it is gone; everything below dies with this process."""
        while True:
            self._poll_once()

    def _poll_once(self) -> None:
        now = time.monotonic()
        wait = min((r.deadline - now for r in self._running.values()), default=None)
        events = self._poll.poll(None if wait is None else max(0, int(wait * 1000) + 1))
        for descriptor, _ in events:
            if descriptor == self._control.fileno():
                self._handle_request()
            elif descriptor in self._running:
                self._finish(self._running.pop(descriptor))
        if wait is not None and not events:
            self._enforce_deadlines()

    def _handle_request(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._control, 4096, 8)
        if not data:
            os._exit(0)
        request = unpack_request(data)
        if isinstance(request, Spawn):
            self._spawn(request, descriptors)
        elif isinstance(request, list):
            self._become_variant(request, descriptors[0])
        else:
            for running in self._running.values():
                if running.identity == request:
                    self._kill(running)
        for descriptor in descriptors:
            os.close(descriptor)

    def _become_variant(self, names: list[str], control: int) -> None:
        """Fork a second zygote that has more modules loaded and its own conversation."""
        if linux.clone(0, self._tid_at):
            return
        for running in self._running.values():
            os.close(running.pidfd)
        self._control.close()
        variant = Zygote(os.dup(control), self._proc, is_flat=self._is_flat)
        os.close(control)
        linux.set_parent_death_signal(signal.SIGKILL)
        gc.unfreeze()
        variant.preload(names)
        variant.serve()

    def _spawn(self, spawn: Spawn, descriptors: list[int]) -> None:
        flags = 0 if self._is_flat else linux.CLONE_NEWPID | linux.CLONE_NEWNS
        try:
            pid = linux.clone(flags, self._tid_at)
        except OSError as error:
            self._control.send(pack_exit(spawn.identity, 0, 0.0, 0.0, 0, 0.0, failure=str(error)))
            return
        if pid == 0:
            self._child(spawn, descriptors)
        running = _Running(spawn.identity, pid, spawn.wall_s)
        self._running[running.pidfd] = running
        self._poll.register(running.pidfd, select.POLLIN)

    def _finish(self, running: _Running) -> None:
        self._poll.unregister(running.pidfd)
        os.close(running.pidfd)
        _, status, usage = os.wait4(running.pid, 0)
        wall_s = time.monotonic() - running.started
        with contextlib.suppress(BlockingIOError):
            self._ready.update(n for (n,) in struct.iter_unpack("<I", os.read(self._ready_read, 4096)))
        failure = "" if running.identity in self._ready else "the program's process could not be set up"
        self._ready.discard(running.identity)
        self._control.send(
            pack_exit(
                running.identity,
                status,
                wall_s,
                usage.ru_utime + usage.ru_stime,
                max(0, usage.ru_maxrss - self._own_kb),
                running.granted,
                timed_out=running.timed_out,
                failure="" if running.timed_out else failure,
            )
        )

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for running in self._running.values():
            if running.deadline <= now and not running.timed_out:
                # a program that was ready to run but got no CPU is given that time back, once over at most
                owed = min(self._starved_s(running.pid), running.wall_s) - running.granted
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

    def _child(self, spawn: Spawn, descriptors: list[int]) -> NoReturn:
        leave = os._exit
        try:
            run = self._confine(spawn, descriptors)
        except BaseException as error:  # noqa: BLE001 - set-up failed: no ready word, so the parent knows
            with contextlib.suppress(OSError):
                os.write(2, f"{type(error).__name__}: {error}".encode())
            leave(1)
        _run_and_leave(run, leave)

    def _confine(self, spawn: Spawn, descriptors: list[int]) -> Any:
        os.setsid()  # kill(0) reaches a process group across pid namespaces
        if self._is_flat:
            linux.set_parent_death_signal(signal.SIGKILL)  # no namespace would take it down with us
        else:
            linux.mount(b"tmp", b"/tmp", b"tmpfs", linux.MS_NOSUID | linux.MS_NODEV, spawn.mount_options)
            os.chdir("/tmp")
        source = os.pread(descriptors[0], spawn.source_bytes, 0)
        given = iter(descriptors[1:])
        if spawn.has_stdin:
            os.dup2(next(given), 0)
        if spawn.has_output:
            os.dup2(next(given), 1)
            os.dup2(next(given), 2)
        keep = 3
        if spawn.mode is not Mode.script:
            extra = [fcntl.fcntl(d, fcntl.F_DUPFD, _FIRST_OWN_FD) for d in given]
            for descriptor in extra:
                os.dup2(descriptor, keep)
                keep += 1
        _set_limits(spawn, self._own_mb)
        linux.drop_capabilities()
        seccomp.install(seccomp.program_filter(os.getpid()) if self._is_flat else self._program_filter)
        os.write(self._ready_write, struct.pack("<I", spawn.identity))
        os.closerange(keep, 1 << 16)
        gc.enable()
        if spawn.mode is Mode.script:
            return lambda: _run_script(source)
        if spawn.mode is Mode.candidate:
            return lambda: candidate.serve(3, source)
        return lambda: judge.judge(3, 4, source)


def _move_up(descriptor: int) -> int:
    """Return a copy far above the descriptors a program is given."""
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FD)
    os.close(descriptor)
    return copy


def _read(path: str, directory: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=directory)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def _set_limits(spawn: Spawn, own_mb: int) -> None:
    setrlimit = resource.setrlimit
    # soft = hard: the first process of a pid namespace would ignore the soft limit's SIGXCPU
    setrlimit(resource.RLIMIT_CPU, (spawn.cpu_s, spawn.cpu_s))
    memory = (own_mb + spawn.mem_mb) << 20
    setrlimit(resource.RLIMIT_AS, (memory, memory))
    setrlimit(resource.RLIMIT_FSIZE, (spawn.file_bytes, spawn.file_bytes))
    setrlimit(resource.RLIMIT_NOFILE, (spawn.nofile, spawn.nofile))
    processes = spawn.nproc + _SETTLED_PROCESSES
    setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    for limit in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        setrlimit(limit, (0, 0))


def _run_script(source: bytes) -> int:
    """Run a program the way ``python main.py`` would; return its exit status."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__="main.py", __builtins__=sys.modules["builtins"])
    sys.modules["__main__"] = module
    status = 0
    try:
        code = compile(source, "main.py", "exec", dont_inherit=True)
    except BaseException:  # noqa: BLE001 - whatever stops the compiler is the program's
        _show_error()
        return 77
    try:
        exec(code, module.__dict__)  # the program itself; the cell is the fence
    except SystemExit as exit_request:
        status = _exit_status(exit_request.code)
    except BaseException:  # noqa: BLE001 - as the interpreter does: a traceback and status 1
        _show_error()
        status = 1
    # as at interpreter exit: threads, exit functions, then the module's objects (files flush themselves)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        module.__dict__.clear()
    return status


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code) & 0xFF
    try:
        sys.stderr.write(f"{code}\n")
    except BaseException:  # noqa: BLE001 - the object's text is the program's
        return 1
    return 1


def _show_error() -> None:
    try:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    except BaseException:  # noqa: BLE001 - hook and exception are the program's
        return


def _run_and_leave(run: Any, leave: Any) -> NoReturn:
    """Run the program and end this process without ever returning into the zygote's loop."""
    status = 1
    try:
        status = run() or 0
    except BaseException:  # noqa: BLE001 - a program can break any of our own steps
        status = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None:
                    stream.flush()
            except BaseException:  # noqa: BLE001 - a full disk, a closed file, an object posing as one
                status = status or 120
        leave(status & 0xFF)
    raise AssertionError("unreachable")
