"""One plugin's queue: sizes its calls, retries, hedges and gives up; its runners make the calls.

A call that stalls is hedged: its open items are sent again, each alone, to another runner, and the first
result of an item counts. A response that exceeds its limit or kills a worker triggers a probe: the same row
with an empty response. If the plugin answers the probe, only the response fails. Otherwise the plugin is
down: its breaker opens and the queued items fail. A batch whose results depend on each other is never split.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from multitask_rl.boundary.printable import counted
from multitask_rl.records import Failure, FailureKind, Rollout, Verdict
from multitask_rl.scoring.grader import PluginFacts
from multitask_rl.scoring.items import STALL_S, Call, CircuitBreaker, Item, Limiter, Runner
from multitask_rl.scoring.results import Result

SPARE_RUNNERS = 2
"""Runners beyond ``num_workers``, started only while others stall."""
GROW_AFTER_S = 0.1
ONE_BY_ONE_CALL_S = 0.05
"""Work in a call of a plugin that is only a loop, so that a response that hangs delays few others."""
BATCH_CALL_S = 5.0
RETRY_PAUSE_S = 0.2
ENDED_AT = 0.9
"""A check is ended after this share of its ``timeout_s``. The rest is for ending it, so that one response
delays its step by less than ``timeout_s``."""
OUTSIDE_KILLS = 10
"""Times that an item is sent again after SIGKILL or SIGTERM, which are rarely the item's fault."""


class Lane:
    """The queue of the plugin ``source``. An item with an ``infra`` failure gets ``retries`` further calls.

    At most ``num_workers`` calls run at once, and ``SPARE_RUNNERS`` more while others stall.
    """

    def __init__(self, source: str, *, num_workers: int, retries: int, limiter: Limiter) -> None:
        self.source = source
        self.facts = PluginFacts()
        """Facts of the built plugin, known once its first runner is up."""
        self.num_workers = num_workers
        self.retries = retries
        self.breaker = CircuitBreaker(source)
        self.runners: list[Runner] = []
        self.make_runner: Callable[[], Runner] | None = None
        """Makes another runner; None = it runs in the trainer's process, once."""
        self.error: Exception | None = None
        """A bug in a runner; the round that waits raises it."""
        self._limiter = limiter
        self._condition = threading.Condition()
        self._queue: deque[Item] = deque()
        self._waiting_since = self._last_answer = self._mean_s = 0.0
        self._has_answered, self._dead_probes = False, 0
        self._first: Runner | None = None
        self._closed = False

    # ------------------------------------------------------------------ called by the pool

    def start(self, runner: Runner) -> None:
        """Start ``runner``; it may not be up yet."""
        self._first = self._first or runner
        self.runners.append(runner)
        runner.start()

    def wait_ready(self) -> None:
        """Return once the first runner is up; raises as its ``wait_up``."""
        assert self._first is not None, "the lane was not started"
        self._first.wait_up()

    def submit(self, items: Sequence[Item]) -> None:
        """Queue ``items``; their latches count down as results arrive. In a closed lane they fail at once."""
        with self._condition:
            now = time.monotonic()
            if not self._queue:
                self._waiting_since = now
                if not self._calls():
                    self._last_answer = now
            self._queue.extend(items)
            if self._closed:
                self._fail_everything(FailureKind.infra, "the reward pool was closed")
            self._refuse_if_open()
            self._condition.notify_all()

    def cancel(self, items: Sequence[Item]) -> None:
        """Fail those of ``items`` that no call has taken yet."""
        with self._condition:
            unwanted = set(map(id, items))
            failure = self._failure(FailureKind.infra, "given up: its result is not needed")
            for item in self._queue:
                if id(item) in unwanted:
                    self._set_result(item, failure)

    def tick(self) -> None:
        """Hedge calls that stall, start another runner where work waits."""
        with self._condition:
            now, calls = time.monotonic(), self._calls()
            if self.make_runner is None:
                for call in calls:
                    limit = self.facts.traits.timeout_s * (1 if call.each else len(call.items))
                    if now - call.began > limit:
                        reason = f"a call lasts more than {limit:g} s, and in this process it cannot be ended"
                        if call.open():
                            self.breaker.open(FailureKind.timeout, reason)
                        self._fail_everything(FailureKind.timeout, self._timeout().message)
            elif self._queue or calls:
                self._hedge_stalled(now)
                stalled = sum(now - call.began > STALL_S for call in calls)
                most = self.num_workers + min(SPARE_RUNNERS, stalled)
                is_due = self._queue and not self._closed and now - self._waiting_since >= GROW_AFTER_S
                if is_due and len(calls) == len(self.runners) < most:
                    self.start(self.make_runner())
                    self._waiting_since = now
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

    def explain(self, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict]) -> list[str]:
        """Return a text per violation, "" for none; see ``Constraint``."""
        return self._first.explain(rollouts, verdicts) if self._first is not None else [""] * len(rollouts)

    def close(self) -> None:
        """Stop all runners and fail all open items. Idempotent."""
        with self._condition:
            self._closed = True
            self._fail_everything(FailureKind.infra, "the reward pool was closed")
            self._condition.notify_all()
        for runner in list(self.runners):
            runner.close()

    # ------------------------------------------------------------------ called by runners

    @property
    def limit_s(self) -> float:
        """Seconds after which the call for one response is ended."""
        return ENDED_AT * self.facts.traits.timeout_s

    def limit_of(self, call: Call) -> float:
        """Return the seconds for the next result of ``call``; all tries of an item share its limit."""
        return self.limit_s * (1 if call.each else len(call.items)) - sum(item.spent for item in call.items)

    def take(self, runner: Runner) -> Call | None:
        """Return the next call for ``runner`` (its ``call`` is set); None = stop. Blocks."""
        with self._condition:
            while not self._closed and not runner.closed:
                self._refuse_if_open()
                now = time.monotonic()
                self._queue = deque(item for item in self._queue if item.is_open)
                size = self._next_size(now)
                if size and self._limiter.enter(first=not self._calls()):
                    items = [self._queue.popleft() for _ in range(size)]
                    for item in items:
                        item.started = now
                        item.began = item.began or now
                    self._waiting_since = now
                    runner.call = Call(items, each=self.facts.one_by_one or items[0].alone, began=now)
                    return runner.call
                self._condition.wait(GROW_AFTER_S if self._queue else None)
            return None

    def finished(self, runner: Runner) -> None:
        """End the call of ``runner``; its items without a result are queued again."""
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
                if not isinstance(result, Failure) or result.kind is not FailureKind.infra:
                    self.breaker.success()
                    self._set_result(item, result)
                elif item.result is None and item.attempts < self.retries:
                    item.ready_at = now + RETRY_PAUSE_S * 2**item.attempts
                    item.attempts += 1
                    item.alone = self.facts.independent
                elif item.result is None:
                    self.breaker.infra(result.message)
                    self._set_result(item, result)
            for item in call.items[call.position : call.position + 1]:
                item.started = now

    def died(self, call: Call, reason: str, *, outside: bool, out_of_memory: bool) -> None:
        """Handle the death of the process that made ``call``.

        The suspect is the item being scored, or all items of a batch that cannot be split. ``outside``:
        something else on the machine killed the process.
        """
        with self._condition:
            suspects = call.current()
            for item in call.open():
                item.alone = item.alone or self.facts.independent
            if len(suspects) != 1 and self.facts.independent:
                return
            what = "this sample" if len(suspects) == 1 else "this batch"
            allowed = OUTSIDE_KILLS if outside else 1 if out_of_memory else self.retries
            if suspects and not outside:
                self._probe(suspects[0])
            for item in suspects:
                item.deaths += 1
                item.crashes += not outside
                item.spent += 0.0 if outside else (time.monotonic() - call.began) / len(suspects)
                message = f"the worker process {reason} {counted(item.deaths, 'time')} while scoring {what}"
                failure = self._failure(FailureKind.infra, message)
                if item.subject is not None and not outside:
                    self._set_result(item, failure)
                    self._dead_probes += 1
                    if self._dead_probes > 1 or not self._has_answered:
                        message = f"its worker process {reason}, on an empty response too"
                        self._give_rest(FailureKind.infra, message, message)
                elif item.deaths > allowed and len(suspects) == 1:
                    self._stuck(item, failure, passed_limit=out_of_memory)
                elif item.deaths > allowed:
                    self._set_result(item, failure)

    def unsendable(self, call: Call, message: str) -> None:
        """Handle a rollout that cannot be pickled: alone, or in a batch that cannot be split, it fails."""
        with self._condition:
            for item in call.open():
                if len(call.items) == 1 or not self.facts.independent:
                    text = f"the row cannot be sent to the worker process: {message}"
                    self._set_result(item, self._failure(FailureKind.data, text))
                item.alone = self.facts.independent

    def timed_out(self, call: Call) -> None:
        """Handle the end of the time limit of ``call``: only a probe tells whether the plugin is down."""
        with self._condition:
            now, limit, failure = time.monotonic(), self.limit_s, self._timeout()
            culprits = call.current()
            is_down = False
            for item in culprits:
                if item.subject is not None or not (call.each or self.facts.independent):
                    self._set_result(item, failure)
                    is_down |= item.subject is not None
                    continue
                if call.each or len(call.items) == 1:  # of several one hangs: each is sent alone
                    self._stuck(item, failure, passed_limit=True)
                probe = item.probe
                if probe is not None and probe.result is None and 0 < probe.started <= now - limit / 2:
                    self._set_result(probe, failure)
                    is_down = True
            for item in call.open():
                item.alone = item.alone or self.facts.independent
            is_silent = now - self._last_answer >= 0.9 * limit
            if is_down and is_silent and (self._waiting() or self.breaker.suspicious):
                reason = f"{failure.message}; an empty response got no answer either"
                self._give_rest(FailureKind.timeout, reason, failure.message)

    def unavailable(self, message: str) -> None:
        """Fail the queued items: no worker can be started."""
        with self._condition:
            self.breaker.open(FailureKind.infra, message)
            self._refuse_if_open()

    def leave(self, runner: Runner) -> None:
        """Forget ``runner``, which could not be started."""
        with self._condition:
            if runner in self.runners:
                self.runners.remove(runner)

    # ------------------------------------------------------------------ inside (the lock is held)

    def _calls(self) -> list[Call]:
        return [runner.call for runner in self.runners if runner.call is not None]

    def _waiting(self) -> bool:
        return any(i.is_open for items in (self._queue, *(c.items for c in self._calls())) for i in items)

    def _probe(self, item: Item) -> None:
        """Ask first whether the plugin answers the row of ``item`` with an empty response."""
        if item.probe is None and item.subject is None:
            self._queue.appendleft(item.make_probe())
            self._waiting_since = min(self._waiting_since, time.monotonic() - GROW_AFTER_S)
            self._condition.notify_all()

    def _stuck(self, item: Item, trouble: Failure, *, passed_limit: bool) -> None:
        """Do not try ``item`` again; its result depends on its probe."""
        if item.is_open:
            item.trouble, item.passed_limit = trouble, passed_limit
            self._probe(item)
            self._set_result(item, item.conclusion())

    def _give_rest(self, kind: FailureKind, reason: str, message: str) -> None:
        """Open the breaker and fail all items: the plugin is down."""
        self.breaker.open(kind, reason)
        self._fail_everything(kind, message)
        for runner in self.runners:
            if runner.call is not None and not runner.call.open():
                runner.abort()

    def _call_size(self) -> int:
        """Return the most items for a call, from the seconds that an item has taken so far."""
        facts, most = self.facts, max(1, self.facts.traits.batch_size)
        if not facts.independent:
            return most
        if self.breaker.suspicious:
            return 1
        if facts.waits:
            return most
        if not self._mean_s:
            return 1 if facts.one_by_one else most
        # An eighth of the limit is well within the patience of Call.is_out_of_patience.
        target = ONE_BY_ONE_CALL_S if facts.one_by_one else min(BATCH_CALL_S, self.limit_s / 8)
        return max(1, min(most, int(target / self._mean_s)))

    def _next_size(self, now: float) -> int:
        """Rotate the queue until its first item may go; return how many from there make the next call."""
        for _ in range(len(self._queue)):
            if self._queue[0].ready_at <= now:
                break
            self._queue.rotate(-1)
        else:
            return 0
        size, most = 1, min(self._call_size(), len(self._queue))
        while size < most and not self._queue[0].alone:
            item = self._queue[size]
            if item.alone or item.ready_at > now:
                break
            size += 1
        return size

    def _hedge_stalled(self, now: float) -> None:
        queued = set(map(id, self._queue))
        for call in self._calls():
            current = call.current()
            if now - call.began <= STALL_S or not current:
                continue
            impatient = call.is_out_of_patience(now, self.limit_s)
            if impatient and (len(current) == 1 or not self.facts.independent):
                self._probe(current[0])
            if not self.facts.independent:
                continue
            sent = [item for item in call.items if item.alone and item.is_open]
            if impatient and sent and not self.facts.waits and all(item.probe is None for item in call.items):
                self._probe(sent[0])  # beside the item: if the plugin is down, that costs one limit, not two
            due = call.held_up(now, queued, limit=self.limit_s, waits=self.facts.waits)
            for item in due:
                item.alone = True
                if not call.each:  # all its tries share one limit
                    item.spent += now - call.began
            self._queue.extend(due)
            if due:
                self._waiting_since = now - GROW_AFTER_S

    def _refuse_if_open(self) -> None:
        if self._queue and (refusal := self.breaker.refusal()) is not None:
            for item in self._queue:
                self._set_result(item, refusal)
            self._queue.clear()

    def _fail_everything(self, kind: FailureKind, message: str) -> None:
        failure = self._failure(kind, message)
        for item in [*self._queue, *(i for call in self._calls() for i in call.open())]:
            self._set_result(item, failure)
        self._queue.clear()

    def _failure(self, kind: FailureKind, message: str) -> Failure:
        return Failure(kind=kind, message=message, source=self.source)

    def _timeout(self) -> Failure:
        message = f"no result within its time limit of {self.facts.traits.timeout_s:g} s"
        return self._failure(FailureKind.timeout, message)

    def _set_result(self, item: Item, result: Result | None) -> None:
        if item.result is None and result is not None:
            item.ended = time.monotonic()
            item.result = result
            item.latch.count_down()
            if item.subject is not None:
                self._set_result(item.subject, item.subject.conclusion())
