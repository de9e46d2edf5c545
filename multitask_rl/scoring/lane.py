"""One plugin's queue: sizes its calls, retries, hedges and gives up; its runners make the calls.

A lane never blocks another lane. A call of a plugin that scores responses one by one is limited to about 50
ms of work, so that a response that hangs delays few others. A plugin that takes batches gets up to its
``batch_size``. A call that stalls is hedged: its open items are sent again, each alone, to another runner,
and the first result of an item counts. If results depend on their batch, no call is split.

A response that exceeds its limit or kills a worker process triggers a probe: the same row with an empty
response. If the plugin answers the probe, the response is the cause and only it fails. Otherwise the plugin
is
down: its breaker opens and the waiting items fail.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from multitask_rl.contracts import PluginTraits
from multitask_rl.records import Failure, FailureKind
from multitask_rl.scoring.breaker import CircuitBreaker
from multitask_rl.scoring.grader import Grader, Result
from multitask_rl.scoring.hedging import (
    GROW_AFTER_S,
    STALL_S,
    call_size,
    held_up,
    is_out_of_patience,
    next_size,
)
from multitask_rl.scoring.items import Call, Item, Limiter, Runner, Trouble, probe_of
from multitask_rl.scoring.worker.process import WorkerProcess

__all__ = ["Lane"]

SPARE_RUNNERS = 2
"""Beyond ``num_workers``, started only while others stall."""
RETRY_PAUSE_S = 0.2
ENDED_AT = 0.9
"""A check is ended after this share of its ``timeout_s``. The rest is for ending it, so that one response
delays its step by less than ``timeout_s``."""
OUTSIDE_KILLS = 10
"""How often an item is sent again after SIGKILL or SIGTERM, which are rarely the item's fault."""


class Lane:
    """The work of one plugin.

    Args:
        source: the plugin's name in failures.
        num_workers: calls at once in normal running.
        retries: of ``infra`` failures.
        limiter: the run-wide bound.
    """

    def __init__(self, source: str, *, num_workers: int, retries: int, limiter: Limiter) -> None:
        self.source = source
        self.traits = PluginTraits()
        """The built plugin's, once its first runner is up; likewise the three below."""
        self.one_by_one = False
        self.waits = False
        """A call's length does not grow with its rollouts: it is never cut for the time it takes."""
        self.independent = False
        """A result does not depend on its batch: items may be sent alone."""
        self.num_workers = num_workers
        self.retries = retries
        self.breaker = CircuitBreaker(source)
        self.runners: list[Runner] = []
        self.make_runner: Callable[[], Runner] | None = None
        """Makes another runner; None = it runs in the trainer's process, once."""
        self.error: Exception | None = None
        """A bug in a runner; the pool raises it."""
        self._limiter = limiter
        self._condition = threading.Condition()
        self._queue: deque[Item] = deque()
        self._waiting_since = self._last_answer = self._mean_s = 0.0
        self._has_answered, self._dead_probes = False, 0
        self._first: Runner | None = None
        self._closed = False

    # ------------------------------------------------------------------ the pool's side

    def start(self, runner: Runner) -> None:
        """Start ``runner``, the lane's first; it may not be up yet."""
        self._first = runner
        self.runners.append(runner)
        runner.start()

    def wait_ready(self) -> None:
        """Return once the first runner is up.

        Raises:
            MultitaskRLError: its plugin cannot be built.
        """
        assert self._first is not None, "the lane was not started"
        self._first.wait_up()

    def submit(self, items: Sequence[Item]) -> None:
        """Queue ``items``; their latches count down as results arrive."""
        with self._condition:
            now = time.monotonic()
            if not self._queue:
                self._waiting_since = now
                if not self._calls():
                    self._last_answer = now
            self._queue.extend(items)
            self._refuse_if_open()
            self._condition.notify_all()

    def cancel(self, items: Sequence[Item]) -> None:
        """Give up those of ``items`` that no call has taken yet."""
        with self._condition:
            unwanted = set(map(id, items))
            for item in self._queue:
                if id(item) in unwanted:
                    self._settle(item, self._failure(FailureKind.infra, "given up: its result is not needed"))

    def tick(self) -> None:
        """Hedge calls that stall, start another runner where work waits."""
        with self._condition:
            now = time.monotonic()
            if self.make_runner is None:
                self._give_up_overdue(now)
            elif self._queue or self._calls():
                self._hedge_stalled(now)
                self._grow(now)
            if self._queue:  # a place may have become free, a pause may have ended
                self._condition.notify_all()

    def oldest(self) -> tuple[float, Item] | None:
        """Return the item that has been in a call for the longest time, and that time."""
        with self._condition:
            waiting = [item for call in self._calls() for item in call.current()]
            if not waiting:
                return None
            item = min(waiting, key=lambda i: i.started)
            return time.monotonic() - item.started, item

    def close(self) -> None:
        """Stop all runners, fail what is open. Idempotent."""
        with self._condition:
            self._closed = True
            self._fail_everything(FailureKind.infra, "the reward pool was closed")
            self._condition.notify_all()
        for runner in list(self.runners):
            runner.close()

    # ------------------------------------------------------------------ the runners' side

    @property
    def limit_s(self) -> float:
        """Seconds after which the check of one response is ended."""
        return ENDED_AT * self.traits.timeout_s

    def limit_of(self, call: Call) -> float:
        """Return how many seconds ``call`` may take to its next result: tries of an item share its limit."""
        return self.limit_s * (1 if call.each else len(call.items)) - sum(item.spent for item in call.items)

    def learn(self, plugin: Grader | WorkerProcess) -> None:
        """Take over what the built plugin says of itself."""
        self.traits, self.one_by_one, self.waits = plugin.traits, plugin.one_by_one, plugin.waits
        self.independent = plugin.independent

    def take(self, runner: Runner) -> Call | None:
        """Return the next call for ``runner`` (its ``call`` is set); None = stop. Blocks."""
        with self._condition:
            while not self._closed and not runner.closed:
                self._refuse_if_open()
                now = time.monotonic()
                self._queue = deque(item for item in self._queue if item.is_open)
                size = next_size(self._queue, now, self._call_size())
                if size and self._limiter.enter(first=not self._calls()):
                    items = [self._queue.popleft() for _ in range(size)]
                    for item in items:
                        item.started = now
                        item.began = item.began or now
                    self._waiting_since = now
                    runner.call = Call(items, each=self.one_by_one or items[0].alone, began=now)
                    return runner.call
                self._condition.wait(GROW_AFTER_S if self._queue else None)
            return None

    def finished(self, runner: Runner) -> None:
        """``runner`` ended its call; what has no result is queued again."""
        with self._condition:
            call, runner.call = runner.call, None
            if call is None:
                return
            self._limiter.leave()
            elsewhere = {id(i) for i in self._queue} | {id(i) for c in self._calls() for i in c.items}
            left = [item for item in call.items if item.is_open and id(item) not in elsewhere]
            self._queue.extendleft(reversed(left))
            self._condition.notify_all()

    def answer(self, call: Call, results: Sequence[Result], seconds: float) -> None:
        """Take the next results of ``call``, computed in ``seconds`` together."""
        with self._condition:
            now = time.monotonic()
            items = call.items[call.position : call.position + len(results)]
            call.position += len(results)
            call.began = self._last_answer = now
            self._has_answered, self._dead_probes = True, 0
            share = seconds / max(1, len(items))
            if items and items[0].subject is None:
                self._mean_s = share if not self._mean_s else 0.8 * self._mean_s + 0.2 * share
            for item, result in zip(items, results, strict=True):
                item.seconds += share
                if isinstance(result, Failure) and result.kind is FailureKind.infra:
                    self._retry(item, result, now)
                else:
                    self.breaker.success()
                    self._settle(item, result)
            for item in call.items[call.position : call.position + 1]:
                item.started = now

    def died(self, call: Call, reason: str, *, outside: bool, out_of_memory: bool) -> None:
        """Handle a dead process of ``call``: its current item is the suspect, other items are sent again.

        A batch that cannot be split is suspect as a whole.
        """
        with self._condition:
            suspects = call.current()
            for item in call.open():
                item.alone = item.alone or self.independent
            if len(suspects) != 1 and self.independent:
                return
            what = "this sample" if len(suspects) == 1 else "this batch"
            allowed = OUTSIDE_KILLS if outside else 1 if out_of_memory else self.retries
            if suspects and not outside:
                self._probe(suspects[0])
            for item in suspects:
                item.deaths += 1
                item.spent += 0.0 if outside else (time.monotonic() - call.began) / len(suspects)
                message = f"the worker process {reason} {item.deaths} times while scoring {what}"
                failure = self._failure(FailureKind.infra, message)
                if item.subject is not None and not outside:
                    self._settle(item, failure)
                    self._dead_probes += 1
                    if self._dead_probes > 1 or not self._has_answered:
                        message = f"its worker process {reason}, on an empty response too"
                        self._give_rest(FailureKind.infra, message, message)
                elif item.deaths > allowed and len(suspects) == 1:
                    self._stuck(item, Trouble(failure, is_overrun=out_of_memory))
                elif item.deaths > allowed:
                    self._settle(item, failure)

    def unsendable(self, call: Call, message: str) -> None:
        """Handle a rollout of ``call`` that cannot be pickled; sent alone, it is a ``data`` failure.

        A batch that cannot be split fails as a whole.
        """
        with self._condition:
            for item in call.open():
                if len(call.items) == 1 or not self.independent:
                    text = f"the row cannot be sent to the worker process: {message}"
                    self._settle(item, self._failure(FailureKind.data, text))
                item.alone = self.independent

    def timed_out(self, call: Call) -> None:
        """The time limit of ``call`` passed."""
        with self._condition:
            now, limit, failure = time.monotonic(), self.limit_s, self._timeout()
            culprits = call.current()
            is_down = False
            for item in culprits:
                if item.subject is not None or not (call.each or self.independent):
                    self._settle(item, failure)
                    is_down |= item.subject is not None
                    continue
                if call.each or len(call.items) == 1:  # of several one hangs: each is sent alone
                    self._stuck(item, Trouble(failure, is_overrun=True))
                probe = item.probe
                if probe is not None and probe.result is None and 0 < probe.started <= now - limit / 2:
                    self._settle(probe, failure)
                    is_down = True
            for item in call.open():
                item.alone = item.alone or self.independent
            is_silent = now - self._last_answer >= 0.9 * limit
            if is_down and is_silent and (self._waiting() or self.breaker.suspicious):
                reason = f"{failure.message}, to an empty response neither"
                self._give_rest(FailureKind.timeout, reason, failure.message)

    def unavailable(self, message: str) -> None:
        """No worker can be started: all waiting items fail."""
        with self._condition:
            self.breaker.open(FailureKind.infra, message)
            self._refuse_if_open()

    def leave(self, runner: Runner) -> None:
        """``runner`` could not be started."""
        with self._condition:
            if runner in self.runners:
                self.runners.remove(runner)

    # ------------------------------------------------------------------ inside (the lock is held)

    def _calls(self) -> list[Call]:
        return [runner.call for runner in self.runners if runner.call is not None]

    def _waiting(self) -> bool:
        return any(i.is_open for items in (self._queue, *(c.items for c in self._calls())) for i in items)

    def _probe(self, item: Item) -> None:
        """Ask, before all else, whether the plugin answers the row of ``item`` with an empty response."""
        if item.probe is None and item.subject is None:
            item.probe = probe_of(item)
            self._queue.appendleft(item.probe)
            self._waiting_since = min(self._waiting_since, time.monotonic() - GROW_AFTER_S)
            self._condition.notify_all()

    def _stuck(self, item: Item, trouble: Trouble) -> None:
        """``item`` is not tried again; what it gets depends on its probe."""
        if item.result is None and item.trouble is None:
            item.trouble = trouble
            self._probe(item)
            self._settle(item, item.conclusion())

    def _give_rest(self, kind: FailureKind, reason: str, message: str) -> None:
        """The plugin is down: open the breaker and fail the waiting items."""
        self.breaker.open(kind, reason)
        self._fail_everything(kind, message)
        for runner in self.runners:
            if runner.call is not None and not runner.call.open():
                runner.abort()

    def _call_size(self) -> int:
        most = max(1, self.traits.batch_size)
        if self.independent and self.breaker.suspicious:
            most = 1
        elif self.independent and not self.waits:
            most = call_size(most, self._mean_s, self.limit_s, one_by_one=self.one_by_one)
        return most

    def _hedge_stalled(self, now: float) -> None:
        queued: set[int] | None = None
        for call in self._calls():
            current = call.current()
            if now - call.began <= STALL_S or not current:
                continue
            impatient = is_out_of_patience(call, now, self.limit_s)
            if impatient and (len(current) == 1 or not self.independent):
                self._probe(current[0])
            if not self.independent:
                continue
            queued = queued or set(map(id, self._queue))
            sent = [item for item in call.items if item.alone and item.is_open]
            if impatient and sent and not self.waits and all(item.probe is None for item in call.items):
                self._probe(sent[0])  # beside the item, not after its limit: a plugin that is down costs one
            due = held_up(call, now, queued, limit=self.limit_s, waits=self.waits)
            for item in due:
                item.alone = True
                if not call.each:  # it has been under way; all its tries share one limit
                    item.spent += now - call.began
            self._queue.extend(due)
            if due:
                self._waiting_since = now - GROW_AFTER_S

    def _grow(self, now: float) -> None:
        if not self._queue or self._closed or now - self._waiting_since < GROW_AFTER_S:
            return
        calls = self._calls()
        stalled = sum(now - call.began > STALL_S for call in calls)
        most = self.num_workers + min(SPARE_RUNNERS, stalled)
        if self.make_runner is not None and len(calls) == len(self.runners) < most:
            runner = self.make_runner()
            self.runners.append(runner)
            runner.start()
            self._waiting_since = now

    def _give_up_overdue(self, now: float) -> None:
        """In the trainer's process a call cannot be killed: its items fail, as does what queues behind."""
        for call in self._calls():
            limit = self.traits.timeout_s * (1 if call.each else len(call.items))
            if now - call.began <= limit:
                continue
            if call.open():
                reason = f"a call is out for more than {limit:g} s, and in this process it cannot be ended"
                self.breaker.open(FailureKind.timeout, reason)
            self._fail_everything(FailureKind.timeout, self._timeout().message)

    def _retry(self, item: Item, failure: Failure, now: float) -> None:
        if item.result is not None:
            return
        if item.attempts >= self.retries:
            self.breaker.infra(failure.message)
            self._settle(item, failure)
            return
        item.attempts += 1
        item.alone = self.independent
        item.ready_at = now + RETRY_PAUSE_S * 2 ** (item.attempts - 1)

    def _refuse_if_open(self) -> None:
        if self._queue and (refusal := self.breaker.refusal()) is not None:
            for item in self._queue:
                self._settle(item, refusal)
            self._queue.clear()

    def _fail_everything(self, kind: FailureKind, message: str) -> None:
        failure = self._failure(kind, message)
        for item in [*self._queue, *(i for call in self._calls() for i in call.open())]:
            self._settle(item, failure)
        self._queue.clear()

    def _failure(self, kind: FailureKind, message: str) -> Failure:
        return Failure(kind=kind, message=message, source=self.source)

    def _timeout(self) -> Failure:
        message = f"no result within its time limit of {self.traits.timeout_s:g} s"
        return self._failure(FailureKind.timeout, message)

    def _settle(self, item: Item, result: Result | None) -> None:
        if item.result is None and result is not None:
            item.ended = time.monotonic()
            item.result = result
            item.latch.count_down()
            if item.subject is not None:
                self._settle(item.subject, item.subject.conclusion())
