"""The built-in sandbox: a pool of cells behind one bounded queue.

Threads of the trainer only carry messages: cells are started by exec of a clean interpreter (the trainer,
torch and all, is never forked), verdicts are computed in the monitors.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, Self

from multitask_rl.errors import SandboxError
from multitask_rl.sandbox.backlog import Backlog, QueuedProgram
from multitask_rl.sandbox.base import Outcome, Program, Verdict
from multitask_rl.sandbox.cgroups import delegated_cgroup
from multitask_rl.sandbox.levels import acceptable_levels
from multitask_rl.sandbox.worker import Worker, WorkerLostError, cell_config

__all__ = ["BubblewrapSandbox", "NamespaceSandbox"]

_log = logging.getLogger(__name__)
_MAX_LOSSES = 2
"""Workers that a program may lose while nothing else runs on them: then it is the program that ends them."""


class NamespaceSandbox:
    """Runs programs in cells of this machine; safe to share between threads.

    Args:
        workers: cells, each running one program at a time; more than there are cores gains nothing. As many
            as there are cores: each keeps to one of them.
        level: isolation to use (``namespaces``, ``bwrap``, ``landlock``); None = the strongest that works.
        minimum_level: the weakest level that is acceptable when ``level`` is None.
        packages: third-party packages programs may import, preloaded when a program names them.
        queue_size: programs that may wait; ``submit`` blocks beyond that. 0 = 64 per worker.
        cgroup: cgroup v2 directory with delegated memory and pids controllers, where each cell gets limits of
            its own; None = the one this process is in, when it is delegated.

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
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers!r}")
        if queue_size < 0:
            raise ValueError(f"queue_size must be at least 0, got {queue_size!r}")
        self._owner = os.getpid()
        self._size = queue_size or 64 * workers
        self._cgroup, missing = delegated_cgroup(cgroup)
        if cgroup is not None and self._cgroup is None:
            raise SandboxError(f"cells cannot be limited by the cgroup {cgroup}: {missing}")
        self._workers: list[Worker] = []
        self._threads: list[threading.Thread] = []
        self.level = self._start_strongest(acceptable_levels(level, minimum_level), workers, packages)

    def _start_strongest(self, levels: list[str], workers: int, packages: Sequence[str]) -> str:
        """Start the workers at the first level that works; return it."""
        problems: list[str] = []
        for level in levels:
            error = self._start(workers, cell_config(packages, level))
            if error is None:
                if problems:
                    _log.warning("sandbox at level %s only: %s", level, "; ".join(problems))
                return level
            problems.append(f"{level}: {error}")
        raise SandboxError(
            f"no acceptable isolation on this machine ({'; '.join(problems)}). Run 'multitask-rl doctor' for "
            "what is missing; a weaker level has to be allowed with minimum_level."
        )

    def _start(self, workers: int, config: dict[str, Any]) -> SandboxError | None:
        """Start the workers and their threads; return the first error after stopping what did start."""
        started: queue.Queue[SandboxError | None] = queue.Queue()
        cpus = _one_cpu_each(workers)
        self._workers = [Worker(index, config, self._cgroup, cpus[index]) for index in range(workers)]
        self._backlog = Backlog(self._size, [worker.cancel for worker in self._workers])
        # a monitor dies with the thread that started it, so each is started by the thread that uses it
        self._threads = [
            threading.Thread(
                target=self._serve, args=(w, self._backlog, started), name=f"sandbox-{w.index}", daemon=True
            )
            for w in self._workers
        ]
        for thread in self._threads:
            thread.start()
        errors = [error for error in [started.get() for _ in self._threads] if error is not None]
        if errors:
            self._stop_workers()
            return errors[0]
        return None

    @property
    def monitor_pids(self) -> list[int]:
        """Process ids of the monitors, for health checks."""
        return [worker.pid for worker in self._workers]

    @property
    def restarts(self) -> int:
        """How many monitors had to be replaced since the start."""
        return sum(max(0, worker.restarts) for worker in self._workers)

    def run(self, program: Program) -> Outcome:
        """Run one program and wait for its outcome.

        Raises:
            SandboxError: the sandbox is closed.
        """
        return self.submit(program).result()

    def submit(self, program: Program) -> Future[Outcome]:
        """Queue one program; blocks while the queue is full.

        ``cancel`` of the future works at any time: a program that waits is not run, one that runs is killed.

        Raises:
            SandboxError: the sandbox is closed, or belongs to the process this one was forked from.
        """
        if os.getpid() != self._owner:
            raise SandboxError("this sandbox belongs to the parent process: open one after the fork")
        return self._backlog.put(program)

    def map(self, programs: Iterable[Program]) -> list[Outcome]:
        """Run programs concurrently; outcomes in the order of the programs."""
        futures = [self.submit(program) for program in programs]
        wait(futures)  # woken once, not by every outcome
        return [future.result() for future in futures]

    def close(self) -> None:
        """Kill what runs, cancel what waits, end every process. Safe to call twice."""
        if os.getpid() != self._owner:
            return
        for item in self._backlog.close():
            item.future.cancel()
        self._stop_workers()

    def _stop_workers(self) -> None:
        self._backlog.close()
        for worker in self._workers:
            worker.interrupt()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self, worker: Worker, backlog: Backlog, started: queue.Queue[SandboxError | None]) -> None:
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
                    _exchange(worker, backlog)
                except WorkerLostError as error:
                    _recover(worker, backlog, f"sandbox worker {worker.index} was lost: {error}")
        finally:
            _fail(backlog.drop(worker.index), worker, "the sandbox was closed while the program ran")
            worker.stop()


def _one_cpu_each(workers: int) -> list[int | None]:
    """Return a CPU per worker where there is one for each at most, else None for all.

    A worker is a chain of processes that wake each other; the kernel often puts two on one CPU while another
    is idle. Fewer workers than CPUs stay free, to go where a CPU is idle.
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not cpus or workers < len(cpus):
        return [None] * workers
    return [cpus[index % len(cpus)] for index in range(workers)]


def _exchange(worker: Worker, backlog: Backlog) -> None:
    """Hand over programs, then take what has ended."""
    for item in backlog.take(worker.index):
        try:
            worker.hand_over(item.identity, item.program)
        except Exception as error:  # noqa: BLE001 - a program that cannot be sent must not hang its future
            backlog.finish(worker.index, item.identity)
            item.future.give(error)
    worker.send()
    if not worker.owes:
        return
    while True:
        identity, outcome = worker.receive()
        ended = backlog.finish(worker.index, identity)
        if ended is not None and outcome is not None:
            ended.future.give(replace(outcome, retries=ended.retries) if ended.retries else outcome)
        if not worker.owes or not worker.has_answer:
            return


def _recover(worker: Worker, backlog: Backlog, problem: str) -> None:
    """Replace a lost worker; what it had is run again, each program alone.

    The new worker has run a program of ours before it gets one of these. One that loses two workers alone is
    therefore to blame: it has an outcome, not a failure of the sandbox that would leave it without a score.
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
            _fail(lost, worker, message, Verdict.killed)
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
    items: list[QueuedProgram], worker: Worker, problem: str, verdict: Verdict = Verdict.infrastructure_error
) -> None:
    for item in items:
        item.future.give(
            Outcome(
                verdict=verdict,
                message=problem,
                worker=worker.index,
                retries=item.retries,
            )
        )


class BubblewrapSandbox(NamespaceSandbox):
    """The same sandbox with cells that bubblewrap builds, for who trusts its set-up more than ours.

    Args:
        workers: as for ``NamespaceSandbox``.
        packages: as for ``NamespaceSandbox``.
        queue_size: as for ``NamespaceSandbox``.

    Raises:
        SandboxError: bubblewrap is not installed or may not make namespaces here.
    """

    def __init__(
        self, workers: int = 2, *, packages: Sequence[str] = ("numpy",), queue_size: int = 0
    ) -> None:
        super().__init__(workers, level="bwrap", packages=packages, queue_size=queue_size)
