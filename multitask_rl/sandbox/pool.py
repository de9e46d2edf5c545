"""The built-in sandbox: cells behind one bounded queue.

Threads of the trainer carry messages only. Keepers decide how programs ended. They start by exec in a clean
interpreter, so the trainer is never forked.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from multitask_rl.errors import SandboxError
from multitask_rl.sandbox.backlog import Backlog, QueuedProgram
from multitask_rl.sandbox.base import Ending, Outcome, Program, Sandbox
from multitask_rl.sandbox.cgroups import delegated_cgroup
from multitask_rl.sandbox.worker import LEVELS, Worker, WorkerLostError, cell_config

_log = logging.getLogger(__name__)
_MAX_LOSSES = 2
"""A program that loses so many workers while it runs alone is the cause of their ends."""


def acceptable_levels(level: str | None, minimum_level: str) -> list[str]:
    """Return the levels that may be used, strongest first: ``level``, else all down to ``minimum_level``.

    Raises:
        SandboxError: a level is unknown.
    """
    for name in (level, minimum_level):
        if name is not None and name not in LEVELS:
            known = ", ".join(LEVELS)
            raise SandboxError(f"unknown isolation level {name!r}; levels, strongest first: {known}")
    return [level] if level is not None else list(LEVELS[: LEVELS.index(minimum_level) + 1])


class NamespaceSandbox(Sandbox):
    """Runs programs in cells of this machine; safe to share between threads.

    Args:
        workers: cells; each runs one program at a time. More cells than cores gain nothing; with one for each
            core, each keeps to its core.
        level: isolation to use (``namespaces``, ``bwrap``, ``landlock``); None = the strongest that works.
        minimum_level: the weakest acceptable level when ``level`` is None.
        packages: third-party packages that programs may import, loaded before a program that names them.
        queue_size: programs that may wait; ``submit`` blocks beyond that. 0 = 64 per worker.
        cgroup: cgroup v2 directory with delegated memory and pids controllers, where each cell gets limits;
            None = that of this process, when it is delegated.

    Raises:
        SandboxError: this machine cannot give ``minimum_level`` (or ``level``).
        ValueError: a size is out of range.
    """

    def __init__(
        self,
        workers: int = 2,
        *,
        level: str | None = None,
        minimum_level: str = "namespaces",
        packages: Sequence[str] = ("numpy",),
        queue_size: int = 0,
        cgroup: str | None = None,
    ) -> None:
        for name, size, least in (("workers", workers, 1), ("queue_size", queue_size, 0)):
            if size < least:
                raise ValueError(f"{name} must be at least {least}, got {size!r}")
        self._owner = os.getpid()
        self._cgroup, missing = delegated_cgroup(cgroup)
        if cgroup is not None and self._cgroup is None:
            raise SandboxError(f"cells cannot be limited by the cgroup {cgroup}: {missing}")
        # A worker is a chain of processes that wake each other; the kernel often puts two on one CPU while
        # another is idle. So each keeps to a CPU, unless there are CPUs left: then it goes where one is idle.
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        is_pinned = bool(cpus) and workers >= len(cpus)
        problems: list[str] = []
        for name in acceptable_levels(level, minimum_level):
            self.level, config = name, cell_config(packages, name)
            pins = [cpus[index % len(cpus)] if is_pinned else None for index in range(workers)]
            self._workers = [Worker(index, config, self._cgroup, cpu) for index, cpu in enumerate(pins)]
            self._backlog = Backlog(queue_size or 64 * workers, [worker.cancel for worker in self._workers])
            started: queue.Queue[SandboxError | None] = queue.Queue()
            # a keeper dies with the thread that started it: the thread that uses it starts it
            self._threads = []
            for worker in self._workers:
                given = (worker, self._backlog, started)
                thread = threading.Thread(
                    target=_serve, args=given, name=f"sandbox-{worker.index}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
            errors = [error for error in [started.get() for _ in self._threads] if error is not None]
            if not errors:
                if problems:
                    _log.warning("sandbox at level %s only: %s", name, "; ".join(problems))
                return
            self.close()
            problems.append(f"{name}: {errors[0]}")
        raise SandboxError(
            f"no acceptable isolation on this machine ({'; '.join(problems)}). Run 'multitask-rl doctor' for "
            "what is missing; a weaker level has to be allowed with minimum_level."
        )

    @property
    def keeper_pids(self) -> list[int]:
        """Process ids of the keepers; without one that is being replaced."""
        return [pid for worker in self._workers if (pid := worker.pid)]

    @property
    def restarts(self) -> int:
        """Number of keepers that were replaced since the start."""
        return sum(max(0, worker.restarts) for worker in self._workers)

    def submit(self, program: Program) -> Future[Outcome]:
        """See ``Sandbox``; ``cancel`` also kills a program that runs. ``SandboxError`` in a forked child."""
        if os.getpid() != self._owner:
            raise SandboxError("this sandbox belongs to the parent process: open one after the fork")
        return self._backlog.put(program)

    def close(self) -> None:
        """See ``Sandbox``."""
        if os.getpid() != self._owner:
            return
        for item in self._backlog.close():
            item.future.cancel()
        for worker in self._workers:
            worker.interrupt()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10)


def _serve(worker: Worker, backlog: Backlog, started: queue.Queue[SandboxError | None]) -> None:
    """Carry programs to one worker until the sandbox closes."""
    try:
        worker.start()
    except SandboxError as error:
        started.put(error)
        return
    started.put(None)
    try:
        while not backlog.is_closed:
            try:
                for item in backlog.take(worker.index):
                    try:
                        worker.hand_over(item.identity, item.program)
                    except Exception as error:  # noqa: BLE001 - a program that cannot be sent must not hang its future
                        backlog.finish(worker.index, item.identity)
                        item.future.give(error)
                worker.send()
                for identity, outcome in worker.outcomes():
                    ended = backlog.finish(worker.index, identity)
                    if ended is not None and outcome is not None:
                        if ended.retries:
                            outcome = replace(outcome, retries=ended.retries)
                        ended.future.give(outcome)
            except WorkerLostError as error:
                _recover(worker, backlog, f"sandbox worker {worker.index} was lost: {error}")
    finally:
        _fail(backlog.drop(worker.index), worker, "the sandbox was closed while the program ran")
        worker.stop()


def _recover(worker: Worker, backlog: Backlog, problem: str) -> None:
    """Replace a lost worker; its programs run again, each alone.

    A new worker runs a program of ours first. So a program that loses two workers while it runs alone is the
    cause. It gets an outcome with a score; a failure of the sandbox would have none.
    """
    lost = backlog.drop(worker.index)
    if backlog.is_closed:
        _fail(lost, worker, "the sandbox was closed while the program ran")
        return
    _log.warning("%s; starting a new one, %d programs are run again", problem, len(lost))
    if len(lost) == 1:
        lost[0].losses_alone += 1
        if lost[0].losses_alone >= _MAX_LOSSES:
            message = f"its worker was lost {_MAX_LOSSES} times while it ran alone: {problem}"
            _fail(lost, worker, message, Ending.killed)
            lost = []
    for item in lost[:1]:
        item.retries += 1
    for item in lost:
        item.is_suspect = True
    try:
        worker.start()
    except SandboxError as error:
        _fail(lost, worker, str(error))
    else:
        backlog.put_back(lost)


def _fail(
    items: list[QueuedProgram], worker: Worker, problem: str, ending: Ending = Ending.infrastructure_error
) -> None:
    for item in items:
        item.future.give(Outcome(ending=ending, message=problem, worker=worker.index, retries=item.retries))


class BubblewrapSandbox(NamespaceSandbox):
    """The same sandbox with cells that bubblewrap builds; arguments and errors as of ``NamespaceSandbox``."""

    def __init__(
        self, workers: int = 2, *, packages: Sequence[str] = ("numpy",), queue_size: int = 0
    ) -> None:
        super().__init__(workers, level="bwrap", packages=packages, queue_size=queue_size)
