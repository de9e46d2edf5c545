"""Runners make a lane's calls, in a killable worker process or in the trainer's process."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import ParamSpec, TypeVar

from multitask_rl.boundary.printable import counted
from multitask_rl.errors import MultitaskRLError
from multitask_rl.records import Failure, Rollout, Verdict
from multitask_rl.scoring.grader import PluginPlan
from multitask_rl.scoring.items import Call, Runner
from multitask_rl.scoring.lane import Lane
from multitask_rl.scoring.process import OUT_OF_MEMORY, PluginOutput, WorkerDiedError, WorkerProcess
from multitask_rl.scoring.results import Result

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

START_CRASHES, START_KILLS = 3, 100
"""Processes that may die while starting, by themselves or killed from outside, before the plugin counts as
unavailable."""


class ProcessRunner(Runner):
    """Owns one worker process at a time; replaces it when it dies or is killed for its time limit."""

    def __init__(self, lane: Lane, plan: PluginPlan, output: PluginOutput) -> None:
        super().__init__(lane.source)
        self._lane, self._plan, self._output = lane, plan, output
        self._worker: WorkerProcess | None = None
        self._lock = threading.Lock()
        self._up = threading.Event()
        self._error: Exception | None = None

    def wait_up(self) -> None:
        """Return once the first process is ready and the lane has the plugin's facts; raises its error."""
        self._up.wait()
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Kill the process, which ends the call under way."""
        with self._lock:
            if self._worker is not None:
                self._worker.terminate()

    def close(self) -> None:
        """Kill the process and end the thread. Idempotent."""
        self._closing.set()
        self.abort()
        self._join(5.0)

    def run(self) -> None:
        """Make the lane's calls in a worker process until the lane closes; then kill the process."""
        lane = self._lane
        try:
            self._start_worker()
        except Exception as error:  # noqa: BLE001 - raised again by wait_up
            self._error = error
            lane.leave(self)
            return
        finally:
            self._up.set()
        try:
            while not self.closed:
                try:
                    worker = self._worker or self._start_worker()
                except (MultitaskRLError, OSError) as error:
                    if not self.closed:
                        logger.error("%s: no worker process: %s", lane.source, error)
                        lane.unavailable(f"its worker process cannot be started: {error}")
                        self._closing.wait(1.0)
                    continue
                if (call := lane.take(self)) is None:
                    break
                try:
                    self._make(call, worker)
                finally:
                    lane.finished(self)
        except Exception as error:  # noqa: BLE001 - a bug of ours: raised again by the round that waits
            lane.error = error
        with self._lock:
            last, self._worker = self._worker, None
        if last is not None:
            last.kill()

    def _make(self, call: Call, worker: WorkerProcess) -> None:
        lane = self._lane
        limit = lane.limit_of(call)
        try:
            rollouts = [item.rollout for item in call.items]
            worker.submit(rollouts, [item.failed_calls for item in call.items], each=call.each)
            while call.position < len(call.items):
                results = self._results(worker, call, call.began + limit)
                if results is None:
                    return self._drop(worker)
                lane.answer(call, results, time.monotonic() - call.began)
        except TimeoutError:
            call.at = worker.at()
            self._drop(worker)
            lane.timed_out(call)
        except WorkerDiedError as error:
            call.at = worker.at()
            self._drop(worker)
            if not self.closed and call.open():
                logger.warning("%s: its worker process %s; started again", lane.source, error.reason)
                out_of_memory = error.returncode == OUT_OF_MEMORY
                lane.died(call, error.reason, outside=error.is_outside, out_of_memory=out_of_memory)
        except pickle.PicklingError as error:
            lane.unsendable(call, str(error))

    def _results(self, worker: WorkerProcess, call: Call, deadline: float) -> list[Result] | None:
        """Wait for results; None when hedges have answered every item: the process is not waited for."""
        while True:
            now = time.monotonic()
            # a last look after the deadline: this process itself may have been held up
            with contextlib.suppress(TimeoutError):
                return worker.results(max(now + 0.01, min(deadline, now + 0.25)))
            if now >= deadline:
                raise TimeoutError
            call.at = worker.at()
            if not call.open():
                return None

    def _start_worker(self) -> WorkerProcess:
        crashes, kills, reason = 0, 0, "was not started"
        while crashes < START_CRASHES and kills < START_KILLS:
            worker = WorkerProcess(self._plan, self._output)
            with self._lock:
                self._worker = worker
            try:
                if self.closed:
                    worker.terminate()
                self._lane.facts = worker.wait_ready()
                return worker
            except WorkerDiedError as error:
                self._drop(worker)
                if self.closed:
                    break
                reason = error.reason
                crashes, kills = crashes + (not error.is_outside), kills + error.is_outside
            except MultitaskRLError:
                self._drop(worker)
                raise
        raise OSError(f"it {reason} while starting ({counted(max(1, crashes + kills), 'time')} in a row)")

    def _drop(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._worker = None
        worker.kill()


class LocalRunner(Runner):
    """Calls a plugin in the trainer's process, one call at a time; a call that hangs cannot be ended."""

    def __init__(self, lane: Lane, plan: PluginPlan) -> None:
        super().__init__(lane.source)
        self._lane, self._grader = lane, plan.build()
        self._explaining: Future[list[str] | Failure] | None = None
        self._has_warned = False
        lane.facts = self._grader.facts

    def close(self) -> None:
        """End the thread, unless it hangs, and free the plugin. Idempotent."""
        if self.closed:
            return
        self._closing.set()
        self._join(1.0)
        if not self.is_alive() and (self._explaining is None or self._explaining.done()):
            self._grader.close()

    def explain(self, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict]) -> list[str]:
        """Return a text per violation, "" for none.

        The plugin gets ``timeout_s`` for all. If it fails, or still explains the violations of a former call,
        there is no text, and the first time a warning.
        """
        limit, found = self._grader.traits.timeout_s, None
        if self._explaining is None or self._explaining.done():
            self._explaining = self._begin(self._grader.explain, rollouts, verdicts)
            with contextlib.suppress(TimeoutError):
                found = self._explaining.result(limit)
        if isinstance(found, list):
            return found
        if not self._has_warned:
            problem = f"took more than {limit:g} s" if found is None else found.message
            logger.warning("%s: violations are recorded without explanation: %s", self._lane.source, problem)
            self._has_warned = True
        return [""] * len(rollouts)

    def _begin(self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> Future[T]:
        """Call ``function`` in a new thread, which ends when the call returns.

        Each thread that uses torch has helper threads of OpenMP, which live as long as it does. If there are
        more helpers than cores, they sleep after each operation instead of spinning: sampling that came
        after such calls had 0.6 of its speed (``benchmarks/local_models.py``).
        """
        answer = Future[T]()

        def call() -> None:
            try:
                answer.set_result(function(*args, **keywords))
            except BaseException as error:  # noqa: BLE001 - raised again where the answer is read
                answer.set_exception(error)

        threading.Thread(target=call, name=f"local-{self._lane.source}", daemon=True).start()
        return answer

    def run(self) -> None:
        """Make the lane's calls."""
        lane = self._lane
        try:
            while (call := lane.take(self)) is not None:
                try:
                    for piece in [[item] for item in call.items] if call.each else [call.items]:
                        began = time.monotonic()
                        given = [_for_plugin(item.rollout) for item in piece]
                        results = self._begin(self._grader.grade, given).result()
                        lane.answer(call, results, time.monotonic() - began)
                finally:
                    lane.finished(self)
        except Exception as error:  # noqa: BLE001 - a bug of ours: raised again by the round that waits
            lane.error = error


def _for_plugin(rollout: Rollout) -> Rollout:
    """Return a copy whose row and lists a plugin may change; a process of its own has one anyway."""
    prompt = rollout.prompt
    prompt = replace(prompt, row=dict(prompt.row), prompt_ids=[*prompt.prompt_ids])
    return replace(
        rollout,
        prompt=prompt,
        response_ids=[*rollout.response_ids],
        rollout_logprobs=[*rollout.rollout_logprobs],
        verdicts=dict(rollout.verdicts),
        turns=[*rollout.turns],
    )
