"""The built-in sandbox: a pool of cells behind one bounded queue.

Threads of the trainer only carry messages: cells are started by exec of a clean interpreter (the trainer,
torch and all, is never forked), verdicts are computed in the monitors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Self

from multitask_rl.errors import SandboxError
from multitask_rl.sandbox.base import Outcome, Program, Verdict
from multitask_rl.sandbox.levels import acceptable_levels
from multitask_rl.sandbox.worker import Worker, WorkerLostError, cell_config

__all__ = ["BubblewrapSandbox", "NamespaceSandbox"]

_log = logging.getLogger(__name__)
_MAX_RETRIES = 1

_Item = tuple[Program, "Future[Outcome]"]


class NamespaceSandbox:
    """Runs programs in cells of this machine; safe to share between threads.

    Args:
        workers: cells, each running one program at a time; more than there are cores gains nothing.
        level: isolation to use (``namespaces``, ``bwrap``, ``landlock``); None = the strongest that works.
        minimum_level: the weakest level that is acceptable when ``level`` is None.
        packages: third-party packages programs may import, preloaded when a program names them.
        queue_size: programs that may wait; ``submit`` blocks beyond that. 0 = 64 per worker.

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
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers!r}")
        if queue_size < 0:
            raise ValueError(f"queue_size must be at least 0, got {queue_size!r}")
        self._owner = os.getpid()
        self._queue: queue.Queue[_Item | None] = queue.Queue(queue_size or 64 * workers)
        self._is_closed = threading.Event()
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
        self._is_closed.set()
        raise SandboxError(
            f"no acceptable isolation on this machine ({'; '.join(problems)}). Run 'multitask-rl doctor' for "
            "what is missing; a weaker level has to be allowed with minimum_level."
        )

    def _start(self, workers: int, config: dict[str, Any]) -> SandboxError | None:
        """Start the workers and their threads; return the first error after stopping what did start."""
        started: queue.Queue[SandboxError | None] = queue.Queue()
        self._workers = [Worker(index, config) for index in range(workers)]
        # a monitor dies with the thread that started it, so each is started by the thread that uses it
        self._threads = [
            threading.Thread(target=self._serve, args=(w, started), name=f"sandbox-{w.index}", daemon=True)
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
        """Queue one program; blocks while the queue is full. A cancelled future is not run.

        Raises:
            SandboxError: the sandbox is closed, or belongs to the process this one was forked from.
        """
        if os.getpid() != self._owner:
            raise SandboxError("this sandbox belongs to the parent process: open one after the fork")
        future: Future[Outcome] = Future()
        while not self._is_closed.is_set():
            try:
                self._queue.put((program, future), timeout=0.2)
            except queue.Full:
                continue
            if self._is_closed.is_set():
                _cancel(future)  # close() may have emptied the queue before this program came
            return future
        raise SandboxError("the sandbox is closed")

    def map(self, programs: Iterable[Program]) -> list[Outcome]:
        """Run programs concurrently; outcomes in the order of the programs."""
        futures = [self.submit(program) for program in programs]
        return [future.result() for future in futures]

    def close(self) -> None:
        """Kill what runs, cancel what waits, end every process. Safe to call twice."""
        if os.getpid() != self._owner:
            return
        self._is_closed.set()
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if item is not None:
                    _cancel(item[1])
        self._stop_workers()

    def _stop_workers(self) -> None:
        for worker in self._workers:
            worker.interrupt()
        for _ in self._threads:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self, worker: Worker, started: queue.Queue[SandboxError | None]) -> None:
        """Carry programs to one worker until the sandbox closes."""
        try:
            worker.start()
        except SandboxError as error:
            started.put(error)
            return
        started.put(None)
        try:
            while not self._is_closed.is_set():
                item = self._queue.get()
                if item is None:
                    break
                program, future = item
                if future.set_running_or_notify_cancel():
                    self._carry(worker, program, future)
        finally:
            worker.stop()

    def _carry(self, worker: Worker, program: Program, future: Future[Outcome]) -> None:
        """Give ``future`` its outcome, whatever happens to the worker."""
        problem = ""
        for retries in range(_MAX_RETRIES + 1):
            try:
                future.set_result(worker.run(program, retries))
                return
            except WorkerLostError as error:
                problem = f"sandbox worker {worker.index} was lost: {error}"
            except Exception as error:  # noqa: BLE001 - the future must not hang
                future.set_exception(error)
                return
            if self._is_closed.is_set():
                problem = "the sandbox was closed while the program ran"
                break
            _log.warning("%s; starting a new one (attempt %d)", problem, retries + 1)
            try:
                worker.start()
            except SandboxError as error:
                problem = str(error)
                break
        failed = Outcome(
            verdict=Verdict.infrastructure_error, message=problem, worker=worker.index, retries=_MAX_RETRIES
        )
        future.set_result(failed)


def _cancel(future: Future[Outcome]) -> None:
    """Cancel a future that no worker took, and tell those who wait for it."""
    if future.cancel():
        future.set_running_or_notify_cancel()


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
