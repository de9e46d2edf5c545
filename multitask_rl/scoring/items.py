"""Parts of a lane: items, calls of several items, runners that make calls, run-wide limit, breaker."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from multitask_rl.boundary.printable import counted
from multitask_rl.records import Failure, FailureKind, Rollout, Verdict
from multitask_rl.scoring.results import Result

STALL_S = 0.4
FIRST_REST_S, LONGEST_REST_S = 5.0, 120.0
INFRA_IN_A_ROW = 20


class Latch:
    """Counts open items down to zero."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0

    def expect(self, count: int) -> None:
        """Add open items, before any of them is submitted."""
        with self._condition:
            self._count += count

    def count_down(self) -> None:
        """Close one item."""
        with self._condition:
            self._count -= 1
            if self._count <= 0:
                self._condition.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Return whether all items are closed, after at most ``timeout_s``."""
        with self._condition:
            return self._condition.wait_for(lambda: self._count <= 0, timeout_s)


@dataclass(slots=True, eq=False)
class Item:
    """One rollout for one plugin to score. Only the lane that holds it changes it, under the lane's lock."""

    rollout: Rollout
    latch: Latch
    label: str
    """``<task>/<reward>``, for the log."""
    overrun: Result | None = None
    """The result of a response that exceeds a limit of time or memory; None = that is a failure."""
    result: Result | None = None
    """The first result counts; later ones (of a hedge or an abandoned call) are dropped."""
    seconds: float = 0.0
    """Its share of the seconds of the call that answered it."""
    attempts: int = 0
    """Retries after ``infra`` failures."""
    deaths: int = 0
    """Worker processes that died while they scored it."""
    crashes: int = 0
    """Of these deaths, those that nothing outside caused."""
    spent: float = 0.0
    """Seconds that it took in processes that it ended."""
    alone: bool = False
    """It was in a call that died, failed or stalled: from now on it is sent by itself."""
    started: float = 0.0
    """``time.monotonic()`` of its last call."""
    began: float = 0.0
    """``time.monotonic()`` of its first call."""
    ended: float = 0.0
    """``time.monotonic()`` of its result."""
    counted: bool = False
    """Its seconds are in the task's numbers."""
    ready_at: float = 0.0
    """``time.monotonic()`` before which it is not sent again (pause before a retry)."""
    trouble: Failure | None = None
    """Its failure if the plugin does not answer the probe either; it is not tried again."""
    passed_limit: bool = False
    """The trouble is a limit of time or memory."""
    probe: Item | None = None
    """An item with the same row and an empty response; shows whether the plugin itself works."""
    subject: Item | None = None
    """If this is a probe: the item that it was made for."""

    @property
    def is_open(self) -> bool:
        """It has no result and is still to be tried."""
        return self.result is None and self.trouble is None

    @property
    def failed_calls(self) -> int:
        """Its calls that failed by themselves; the next one draws other random numbers."""
        return self.attempts + self.crashes

    @property
    def has_overrun(self) -> bool:
        """Its result is ``overrun``, the value that its task gives a response that exceeds a limit."""
        return self.result is not None and self.result is self.overrun

    def make_probe(self) -> Item:
        """Return a new probe, the row with an empty response: it shows whether the plugin itself is down."""
        rollout = replace(self.rollout, response="", response_ids=[], rollout_logprobs=[], turns=[])
        self.probe = Item(rollout, Latch(), f"{self.label} (empty response)", alone=True, subject=self)
        return self.probe

    def conclusion(self) -> Result | None:
        """Return the result once the first attempt failed and the probe ended; None before.

        It is ``overrun`` if the attempt exceeded a limit and the plugin answers the probe; else it is the
        failure of the attempt.
        """
        if self.trouble is None or self.probe is None or self.probe.result is None:
            return None
        known = self.probe.result
        answers = not isinstance(known, Failure) or known.kind in (FailureKind.data, FailureKind.grader)
        return self.overrun if self.passed_limit and answers and self.overrun is not None else self.trouble


@dataclass(slots=True, eq=False)
class Call:
    """Items of one plugin that a runner scores with one request."""

    items: list[Item]
    each: bool
    """Rollout by rollout: each result is sent at once and has its own time limit."""
    began: float = field(default_factory=time.monotonic)
    """Start of the wait for its next result."""
    position: int = 0
    """Items answered so far."""
    at: int = 0
    """With ``each``: index of the item being scored, as far as the runner has looked."""
    hedged: bool = False
    """All items that it holds up were sent again."""

    def open(self) -> list[Item]:
        """Return the items without a result."""
        return [item for item in self.items if item.result is None]

    def current(self) -> list[Item]:
        """Return the items being scored right now, as far as they have no result."""
        at = max(self.at, self.position)
        current = self.items[at : at + 1] if self.each else self.items
        return [item for item in current if item.result is None]

    def is_out_of_patience(self, now: float, limit: float) -> bool:
        """Whether its next result has been awaited so long that the plugin may be down."""
        return now - self.began > max(STALL_S, limit / 4)

    def held_up(self, now: float, queued: Collection[int], *, limit: float, waits: bool) -> list[Item]:
        """Return the items of this stalled call that are due to be sent again, each alone.

        With ``each``, the items behind the current one are due at once. Of a batch, one item is due first, to
        show that the plugin answers. Once ``is_out_of_patience``, all are due, because the item that hangs is
        not known; with ``waits``, whose requests cost money, only after ``limit``. Items with an id in
        ``queued`` are not due.
        """
        if len(self.items) < 2 or self.hedged:
            return []
        is_late = now - self.began > limit if waits else self.is_out_of_patience(now, limit)
        if self.each or is_late:
            self.hedged = True
            current = self.current()[: self.each]
            due = [item for item in self.open() if item not in current and (self.each or not item.alone)]
        else:
            due = self.open()[: not any(item.alone for item in self.items)]
        return [item for item in due if id(item) not in queued]


class Runner(threading.Thread):
    """A daemon thread that makes a lane's calls until it is closed."""

    def __init__(self, source: str) -> None:
        super().__init__(name=f"reward-{source}", daemon=True)
        self.call: Call | None = None
        """The call under way."""
        self._closing = threading.Event()

    @property
    def closed(self) -> bool:
        """Whether it was closed: it takes no further call."""
        return self._closing.is_set()

    def wait_up(self) -> None:
        """Return once it can take calls; ``MultitaskRLError`` if its plugin cannot be built."""

    def abort(self) -> None:
        """End the call under way, if it can be ended."""

    def explain(self, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict]) -> list[str]:
        """Return a text per violation, "" for none. A plugin in a worker process is not asked."""
        return [""] * len(rollouts)

    def close(self) -> None:
        """End the thread and free what it holds. Idempotent."""
        raise NotImplementedError

    def _join(self, timeout_s: float) -> None:
        if self.is_alive() and self is not threading.current_thread():
            self.join(timeout_s)


class Limiter:
    """Bounds the calls under way in the whole run; a lane without one may always begin one."""

    def __init__(self, limit: int) -> None:
        self._limit, self._running, self._lock = limit, 0, threading.Lock()

    def enter(self, *, first: bool) -> bool:
        """Return whether a call may begin; ``first``: the lane has none under way."""
        with self._lock:
            if not first and self._running >= self._limit:
                return False
            self._running += 1
            return True

    def leave(self) -> None:
        """Count a call that ended."""
        with self._lock:
            self._running -= 1


class CircuitBreaker:
    """Opens when a plugin hangs or keeps failing: samples fail without a call for a time that doubles."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._infra = 0
        self._rest_s = FIRST_REST_S
        self._open_until = 0.0
        self._kind = FailureKind.infra
        self._reason = ""
        self.opened: list[str] = []
        """Reasons of openings that are not reported yet."""

    @property
    def suspicious(self) -> bool:
        """It opened, and no success has closed it since."""
        return self._open_until > 0.0

    def refusal(self) -> Failure | None:
        """Return the failure of every sample now, or None if calls may go out."""
        left = self._open_until - time.monotonic()
        if left <= 0:
            return None
        message = f"not called: {self._reason}; tried again in {left:.0f} s"
        return Failure(kind=self._kind, message=message, source=self._source)

    def success(self) -> None:
        """Note a result that is no ``infra`` failure."""
        self._infra, self._rest_s, self._open_until = 0, FIRST_REST_S, 0.0

    def infra(self, message: str) -> None:
        """Count an ``infra`` failure after all retries; several in a row open the breaker."""
        self._infra += 1
        if self._infra >= (1 if self.suspicious else INFRA_IN_A_ROW):
            told = f"{counted(self._infra, 'infrastructure failure')} in a row ({message})"
            self.open(FailureKind.infra, told)

    def open(self, kind: FailureKind, reason: str) -> None:
        """Fail samples with ``kind`` and ``reason`` for a time that doubles with each opening."""
        self._kind, self._reason = kind, reason
        self._open_until = time.monotonic() + self._rest_s
        self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
        self._infra = 0
        self.opened.append(f"{self._source} is given a rest: {reason}")
