"""Parts of a lane: items, calls of several items, the latch that a caller waits on, the run-wide limit."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import Protocol

from multitask_rl.records import Failure, FailureKind, Rollout
from multitask_rl.scoring.grader import Result

__all__ = ["Call", "Item", "Latch", "Limiter", "Runner", "Trouble", "probe_of"]


class Latch:
    """Counts open items down to zero."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0

    def expect(self, count: int) -> None:
        """Add so many open items, before any of them is handed on."""
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


@dataclass(frozen=True, slots=True)
class Trouble:
    """The failure of a rollout that was scored alone."""

    failure: Failure
    """What it is if the plugin does not answer an empty response either."""
    is_overrun: bool
    """A limit of time or memory was passed."""


@dataclass(slots=True, eq=False)
class Item:
    """One rollout before one plugin. Only the lane that holds it changes it, under the lane's lock."""

    rollout: Rollout
    latch: Latch
    label: str
    """``<task>/<reward>``, for the log."""
    overrun: Result | None = None
    """The result of a response that passes a limit of time or memory; None = that is a failure."""
    result: Result | None = None
    """The first result counts; later ones (of a hedge or an abandoned call) are dropped."""
    seconds: float = 0.0
    """Its share of the call that answered it."""
    attempts: int = 0
    """Retries after ``infra`` failures."""
    deaths: int = 0
    """Worker processes that died while it was being scored."""
    spent: float = 0.0
    """Seconds that it was being scored in processes that it ended."""
    alone: bool = False
    """It was in a call that died, failed or stalled: it is sent by itself from now on."""
    started: float = 0.0
    """``time.monotonic()`` of its last call."""
    began: float = 0.0
    """``time.monotonic()`` of its first call."""
    ended: float = 0.0
    """``time.monotonic()`` of its result."""
    counted: bool = False
    """Its seconds are in the task's numbers."""
    ready_at: float = 0.0
    """Not before (pause before a retry)."""
    trouble: Trouble | None = None
    """It is not tried again; its result depends on its probe."""
    probe: Item | None = None
    """The same row with an empty response: does the plugin answer that?"""
    subject: Item | None = None
    """A probe's: the item it was made for."""

    @property
    def is_open(self) -> bool:
        """It has no result and is to be tried."""
        return self.result is None and self.trouble is None

    @property
    def has_overrun(self) -> bool:
        """Its result is what its task gives a response that passes a limit."""
        return self.result is not None and self.result is self.overrun

    def conclusion(self) -> Result | None:
        """Return the result that follows from its trouble and its probe; None while one is not known."""
        if self.trouble is None or self.probe is None or self.probe.result is None:
            return None
        known = self.probe.result
        answers = not isinstance(known, Failure) or known.kind in (FailureKind.data, FailureKind.grader)
        overrun = self.overrun if self.trouble.is_overrun and answers else None
        return self.trouble.failure if overrun is None else overrun


def probe_of(item: Item) -> Item:
    """Return the probe of ``item``, which distinguishes a bad response from a plugin that is down."""
    rollout = replace(item.rollout, response="", response_ids=[], rollout_logprobs=[])
    return Item(rollout, Latch(), f"{item.label} (empty response)", alone=True, subject=item)


@dataclass(slots=True, eq=False)
class Call:
    """Items sent together."""

    items: list[Item]
    each: bool
    """Rollout by rollout, each result sent at once and under its own time limit."""
    began: float = field(default_factory=time.monotonic)
    """When the result it waits for was asked for."""
    position: int = 0
    """Items answered so far."""
    at: int = 0
    """With ``each``: index of the item being scored, as far as the runner has looked."""
    hedged: bool = False
    """All it holds up was sent again."""

    def open(self) -> list[Item]:
        """Return the items without a result."""
        return [item for item in self.items if item.result is None]

    def current(self) -> list[Item]:
        """Return the items being scored right now, as far as they have no result."""
        at = max(self.at, self.position)
        current = self.items[at : at + 1] if self.each else self.items
        return [item for item in current if item.result is None]


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


class Limiter:
    """The run-wide bound on calls under way. Every lane may always have one, whatever the others do."""

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
        """A call ended."""
        with self._lock:
            self._running -= 1
