"""Runners make a lane's calls, in a killable worker process or in the trainer's process."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time

from multitask_rl.errors import MultitaskRLError
from multitask_rl.scoring.grader import Grader, Result
from multitask_rl.scoring.items import Call
from multitask_rl.scoring.lane import Lane
from multitask_rl.scoring.output import PluginOutput
from multitask_rl.scoring.worker.main import OUT_OF_MEMORY, WorkerTask
from multitask_rl.scoring.worker.process import WorkerDiedError, WorkerProcess

__all__ = ["LocalRunner", "ProcessRunner"]

logger = logging.getLogger(__name__)

START_CRASHES, START_KILLS = 3, 100
"""Processes that may die while starting, by themselves or killed from outside, before the plugin counts as
unavailable."""
_OUTSIDE_SIGNALS = (9, 15)


class _Thread:
    """A daemon thread that takes the lane's calls until the lane closes."""

    def __init__(self, lane: Lane) -> None:
        self.call: Call | None = None
        self._closing = threading.Event()
        self._lane = lane
        self._thread = threading.Thread(target=self._run, name=f"reward-{lane.source}", daemon=True)

    @property
    def closed(self) -> bool:
        """It takes no further call."""
        return self._closing.is_set()

    def start(self) -> None:
        """Begin to take calls."""
        self._thread.start()

    def wait_up(self) -> None:
        """Return once it can take calls."""

    def _run(self) -> None:
        raise NotImplementedError

    def _join(self, timeout_s: float) -> None:
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)


class ProcessRunner(_Thread):
    """Owns one worker process at a time; replaces it when it dies or is killed for its time limit."""

    def __init__(self, lane: Lane, task: WorkerTask, output: PluginOutput) -> None:
        super().__init__(lane)
        self._task, self._output = task, output
        self._worker: WorkerProcess | None = None
        self._lock = threading.Lock()
        self._up = threading.Event()
        self._error: Exception | None = None
        self.num_started = 0
        """Processes started so far."""

    @property
    def pid(self) -> int:
        """Process id of the worker, 0 while there is none."""
        worker = self._worker
        return worker.pid if worker is not None else 0

    def wait_up(self) -> None:
        """Return once the first process is ready and the lane knows the plugin's traits.

        Raises:
            MultitaskRLError: the plugin cannot be built.
        """
        self._up.wait()
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Kill the process: the call under way ends at once."""
        with self._lock:
            if self._worker is not None:
                self._worker.terminate()

    def close(self) -> None:
        """Kill the process and end the thread. Idempotent."""
        self._closing.set()
        self.abort()
        self._join(5.0)

    def _run(self) -> None:
        try:
            worker = self._start_worker()
            lane = self._lane
            lane.learn(worker)
        except Exception as error:  # noqa: BLE001 - raised again by wait_up
            self._error = error
            self._lane.leave(self)
            return
        finally:
            self._up.set()
        try:
            while self._ensure_worker() and (call := self._lane.take(self)) is not None:
                try:
                    self._make(call)
                finally:
                    self._lane.finished(self)
        except Exception as error:  # noqa: BLE001 - a bug of ours: raised again where the caller waits
            self._lane.error = error
        with self._lock:
            last, self._worker = self._worker, None
        if last is not None:
            last.kill()

    def _make(self, call: Call) -> None:
        worker, lane = self._worker, self._lane
        assert worker is not None, "no process to call"
        limit = lane.limit_of(call)
        try:
            worker.submit([item.rollout for item in call.items], each=call.each)
            while call.position < len(call.items):
                results = self._results(worker, call, call.began + limit)
                lane.answer(call, results, time.monotonic() - call.began)
        except TimeoutError:
            call.at = worker.at()
            self._drop(worker)
            lane.timed_out(call)
        except _AnsweredElsewhereError:
            self._drop(worker)
        except WorkerDiedError as error:
            call.at = worker.at()
            self._drop(worker)
            if not self.closed and call.open():
                logger.warning("%s: its worker process %s; started again", lane.source, error.reason)
                lane.died(
                    call,
                    error.reason,
                    outside=error.signal in _OUTSIDE_SIGNALS,
                    out_of_memory=error.returncode == OUT_OF_MEMORY,
                )
        except pickle.PicklingError as error:
            lane.unsendable(call, str(error))

    def _results(self, worker: WorkerProcess, call: Call, deadline: float) -> list[Result]:
        """Wait for results in slices, to see what hedges have answered meanwhile."""
        while True:
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError
            with contextlib.suppress(TimeoutError):
                return worker.results(min(deadline, now + 0.25))
            call.at = worker.at()
            if not call.open():
                raise _AnsweredElsewhereError

    def _ensure_worker(self) -> bool:
        """Return whether there is a process to call; False = the lane closes."""
        while self._worker is None and not self._closing.is_set():
            try:
                self._start_worker()
            except (MultitaskRLError, OSError) as error:
                if self._closing.is_set():
                    break
                logger.error("%s: no worker process: %s", self._lane.source, error)
                self._lane.unavailable(f"its worker process cannot be started: {error}")
                self._closing.wait(1.0)
        return not self._closing.is_set()

    def _start_worker(self) -> WorkerProcess:
        crashes, kills, reason = 0, 0, "was not started"
        while crashes < START_CRASHES and kills < START_KILLS:
            worker = WorkerProcess(self._task, self._output)
            with self._lock:
                self._worker = worker
                self.num_started += 1
            try:
                if self.closed:
                    worker.terminate()
                worker.wait_ready()
            except WorkerDiedError as error:
                self._drop(worker)
                if self.closed:
                    break
                outside, reason = error.signal in _OUTSIDE_SIGNALS, error.reason
                crashes, kills = crashes + (not outside), kills + outside
            except MultitaskRLError:
                self._drop(worker)
                raise
            else:
                return worker
        raise OSError(f"it {reason} while starting, {max(1, crashes + kills)} times in a row")

    def _drop(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._worker = None
        worker.kill()


class _AnsweredElsewhereError(Exception):
    """Hedges answered every item of the call; its process is not waited for."""


class LocalRunner(_Thread):
    """Calls a plugin in the trainer's process, one call at a time; a hang can only be left behind."""

    def __init__(self, lane: Lane, grader: Grader) -> None:
        super().__init__(lane)
        self._grader = grader
        lane.learn(grader)

    def abort(self) -> None:
        """Do nothing: a thread cannot be stopped."""

    def close(self) -> None:
        """End the thread, unless it hangs, and free the plugin. Idempotent."""
        if self.closed:
            return
        self._closing.set()
        self._join(1.0)
        if not self._thread.is_alive():
            self._grader.close()

    def _run(self) -> None:
        try:
            self._serve(self._lane)
        except Exception as error:  # noqa: BLE001 - a bug of ours: raised again where the caller waits
            self._lane.error = error

    def _serve(self, lane: Lane) -> None:
        while (call := lane.take(self)) is not None:
            try:
                pieces = [[item] for item in call.items] if call.each else [call.items]
                for piece in pieces:
                    began = time.monotonic()
                    results = self._grader.grade([item.rollout for item in piece])
                    lane.answer(call, results, time.monotonic() - began)
            finally:
                lane.finished(self)
