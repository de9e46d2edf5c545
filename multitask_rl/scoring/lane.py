"""One plugin's queue: sizes its calls, retries, hedges and gives up; its runners make the calls.

A lane never blocks another lane. Calls of a plugin that looks at responses one by one are cut to about 50 ms
of work, so that a response that hangs holds up next to nothing. A plugin that takes batches gets up to its
``batch_size``. A call that stalls is hedged: what it holds up goes out again, each item alone, on another
runner, and the first result of an item counts. Where results depend on their batch, no call is cut.

A response that passes its limit or costs a worker process its life is judged by a probe: the same row with an
empty response. If the plugin answers that, the response is the cause, and it alone pays. If it does not, the
plugin is down: its breaker opens and what waits fails.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from multitask_rl.contracts import PluginTraits
from multitask_rl.records import Failure, FailureKind
from multitask_rl.scoring.breaker import CircuitBreaker
from multitask_rl.scoring.grader import Grader, Result
from multitask_rl.scoring.items import Call, Item, Limiter, Trouble, probe_of
from multitask_rl.scoring.process import WorkerProcess

__all__ = ["Lane", "Runner"]

ONE_BY_ONE_CALL_S = 0.05
BATCH_CALL_S = 5.0
GROW_AFTER_S = 0.1
STALL_S = 0.4
SPARE_RUNNERS = 2
"""Beyond ``num_workers``, started only while others stall."""
RETRY_PAUSE_S = 0.2
OUTSIDE_KILLS = 10
"""How often an item is sent again after SIGKILL or SIGTERM, which are rarely the item's fault."""


class Runner(Protocol):
    """Makes calls for a lane from a thread of its own."""

    call: Call | None
    """Under way."""

    @property
    def closed(self) -> bool:
        """It takes no further call."""
        ...

    def start(self) -> None:
        """Begin to take calls."""
        ...

    def wait_up(self) -> None:
        """Return once it can take calls.

        Raises:
            MultitaskRLError: its plugin cannot be built.
        """
        ...

    def abort(self) -> None:
        """Give the call under way up."""
        ...

    def close(self) -> None:
        """Stop, and leave nothing behind."""
        ...


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
        self._waiting_since = 0.0
        self._last_answer = 0.0
        self._has_answered = False
        self._dead_probes = 0
        self._mean_s = 0.0
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
                    message = "given up: nobody waits for it any more"
                    self._settle(item, Failure(kind=FailureKind.infra, message=message, source=self.source))

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
        """Return how long the item that is out longest has been out, and the item."""
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
                size = self._next_size(now)
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
        """The process of ``call`` died. The item it was at is the suspect, the rest is merely sent again.

        A batch that cannot be sent in parts is suspect as a whole.
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
                message = f"the worker process {reason} {item.deaths} times while scoring {what}"
                failure = Failure(kind=FailureKind.infra, message=message, source=self.source)
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
        """A rollout of ``call`` cannot be sent to another process; alone, it is a ``data`` failure.

        With a batch that cannot be sent in parts all of it is.
        """
        with self._condition:
            for item in call.open():
                if len(call.items) == 1 or not self.independent:
                    text = f"the row cannot be sent to the worker process: {message}"
                    self._settle(item, Failure(kind=FailureKind.data, message=text, source=self.source))
                item.alone = self.independent

    def timed_out(self, call: Call) -> None:
        """The time limit of ``call`` passed."""
        with self._condition:
            now, limit, failure = time.monotonic(), self.traits.timeout_s, self._timeout()
            culprits = call.current()
            is_down = False
            for item in culprits:
                if item.subject is not None or not (call.each or self.independent):
                    self._settle(item, failure)
                    is_down |= item.subject is not None
                    continue
                if not call.each and len(call.items) > 1:
                    continue  # of these one hangs: each is sent alone
                self._stuck(item, Trouble(failure, is_overrun=True))
                probe = item.probe
                if probe is not None and probe.result is None and 0 < probe.started <= now - limit / 2:
                    self._settle(probe, failure)
                    is_down = True
            for item in call.open():
                item.alone = item.alone or self.independent
            is_silent = now - self._last_answer >= 0.9 * limit
            if is_down and is_silent and (self._waiting() or self.breaker.suspicious):
                reason = f"no answer within its time limit of {limit:g} s, to an empty response neither"
                self._give_rest(FailureKind.timeout, reason, failure.message)

    def unavailable(self, message: str) -> None:
        """No worker can be had: everything that waits fails."""
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
        return any(i.is_open for call in self._calls() for i in call.items) or any(
            i.is_open for i in self._queue
        )

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
            self._conclude(item)

    def _conclude(self, item: Item) -> None:
        trouble, probe = item.trouble, item.probe
        if trouble is None or probe is None or probe.result is None:
            return
        known = probe.result
        answers = not isinstance(known, Failure) or known.kind in (FailureKind.data, FailureKind.grader)
        overrun = item.overrun if trouble.is_overrun and answers else None
        self._settle(item, trouble.failure if overrun is None else overrun)

    def _give_rest(self, kind: FailureKind, reason: str, message: str) -> None:
        """The plugin is down: ask no more for a while, fail what waits."""
        self.breaker.open(kind, reason)
        self._fail_everything(kind, message)
        for runner in self.runners:
            if runner.call is not None and not runner.call.open():
                runner.abort()

    def _next_size(self, now: float) -> int:
        """Bring an item that may go to the front; return how many from there make the next call."""
        self._queue = deque(item for item in self._queue if item.is_open)
        for _ in range(len(self._queue)):
            if self._queue[0].ready_at <= now:
                break
            self._queue.rotate(-1)
        else:
            return 0
        most = self._call_size() if not self._queue[0].alone else 1
        size = 1
        while size < min(most, len(self._queue)):
            item = self._queue[size]
            if item.alone or item.ready_at > now:
                break
            size += 1
        return size

    def _call_size(self) -> int:
        most = max(1, self.traits.batch_size)
        if not self.independent:
            return most
        if self.breaker.suspicious:
            return 1
        if self.waits:
            return most
        if not self._mean_s:
            return 1 if self.one_by_one else most
        target = ONE_BY_ONE_CALL_S if self.one_by_one else BATCH_CALL_S
        return max(1, min(most, int(target / self._mean_s)))

    def _hedge_stalled(self, now: float) -> None:
        limit = self.traits.timeout_s
        queued: set[int] | None = None
        for call in self._calls():
            age = now - call.began
            current = call.current()
            if age <= STALL_S or not current:
                continue
            patience_ends = age > max(STALL_S, limit / 4)
            if patience_ends and (len(current) == 1 or not self.independent):
                self._probe(current[0])
            if not self.independent or len(call.items) < 2 or call.hedged:
                continue
            queued = queued or set(map(id, self._queue))
            if call.each or age > limit:  # what it holds up does not wait for it
                call.hedged = True
                due = [item for item in call.open() if item not in current[: call.each]]
            else:  # one after the other: a slow batch shall not be computed twice
                sent = [item for item in call.items if item.alone]
                under_way = any(i.is_open and (id(i) in queued or now - i.started <= STALL_S) for i in sent)
                is_due = not sent or (patience_ends and not under_way and not self.waits)
                due = [item for item in call.open() if not item.alone][: 1 if is_due else 0]
            due = [item for item in due if id(item) not in queued]
            for item in due:
                item.alone = True
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
        failure = Failure(kind=kind, message=message, source=self.source)
        for item in [*self._queue, *(i for call in self._calls() for i in call.open())]:
            self._settle(item, failure)
        self._queue.clear()

    def _timeout(self) -> Failure:
        message = f"no result within its time limit of {self.traits.timeout_s:g} s"
        return Failure(kind=FailureKind.timeout, message=message, source=self.source)

    def _settle(self, item: Item, result: Result) -> None:
        if item.result is None:
            item.ended = time.monotonic()
            item.result = result
            item.latch.count_down()
            if item.subject is not None:
                self._conclude(item.subject)
