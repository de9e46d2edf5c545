"""Programs that wait for a worker or run on one, with the futures of their outcomes."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from multitask_rl.errors import SandboxError
from multitask_rl.sandbox.base import Outcome, Program

_HANDFUL = 8
"""Most programs that a worker holds: between two of them it does not wait for a busy trainer."""
_STUCK_S = 0.05
"""A program that runs for longer is a long one: other workers take over what waits behind it."""

_cancelling = threading.RLock()


class ProgramFuture(Future[Outcome]):
    """The future of a program's outcome. ``cancel`` also kills a program that runs."""

    def __init__(self, stop: Callable[[ProgramFuture], None]) -> None:
        super().__init__()
        self._stop = stop
        self.is_taken = False
        """A worker has or had the program."""

    def running(self) -> bool:
        """Return whether a worker has the program."""
        return self.is_taken and not self.done()

    def cancel(self) -> bool:
        """Cancel the program, whether it waits or runs; return False if it has ended."""
        with _cancelling:
            if self.cancelled():
                return True
            if not super().cancel():
                return False
            self.set_running_or_notify_cancel()  # wakes those who wait
        self._stop(self)
        return True

    def give(self, outcome: Outcome | BaseException) -> None:
        """Set the outcome, unless the future is cancelled."""
        with contextlib.suppress(InvalidStateError):
            if isinstance(outcome, BaseException):
                self.set_exception(outcome)
            else:
                self.set_result(outcome)


@dataclass(slots=True, eq=False)
class QueuedProgram:
    """A program that waits or runs."""

    program: Program
    future: ProgramFuture
    retries: int = 0
    losses_alone: int = 0
    """Workers that were lost while they had this program only."""
    is_suspect: bool = False
    """A worker was lost with it. It runs alone from now on, which shows whether it is the cause."""
    identity: int = 0


@dataclass(slots=True, eq=False)
class _Hand:
    """The programs that one worker holds, in the order in which they run."""

    cancel: Callable[[int], None]
    items: dict[int, QueuedProgram] = field(default_factory=dict)
    since: float = 0.0
    """When the first of them began, at the latest (``time.monotonic()``)."""


class Backlog:
    """The programs that wait, at most ``size``, and those that each worker holds. Thread-safe.

    ``cancels`` holds a function per worker; it gives up the program of an identity on that worker.
    """

    def __init__(self, size: int, cancels: Iterable[Callable[[int], None]]) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._has_work = threading.Condition(self._lock)
        self._waiting: deque[QueuedProgram] = deque()
        self._hands = [_Hand(cancel) for cancel in cancels]
        self._identities = itertools.count(1)
        self.is_closed = False

    def put(self, program: Program) -> ProgramFuture:
        """Queue a program; blocks while ``size`` programs wait. ``SandboxError`` if the sandbox is closed."""
        with self._lock:
            while len(self._waiting) >= self._size and not self.is_closed:
                self._has_room.wait()
            if self.is_closed:
                raise SandboxError("the sandbox is closed")
            future = ProgramFuture(self._stop)
            self._waiting.append(QueuedProgram(program, future))
            self._has_work.notify()
            return future

    def take(self, worker: int) -> list[QueuedProgram]:
        """Return further programs for ``worker``, which holds them from now on.

        A worker that holds none waits. The list is empty if the backlog is closed, or if the worker holds
        programs and gets no more now.

        A worker takes only a share of the queue: the others find programs, too. One that holds none first
        takes over programs that wait behind a long one of another worker.
        """
        with self._lock:
            hand = self._hands[worker]
            while not self.is_closed:
                found: list[QueuedProgram] = []
                now = time.monotonic()
                stuck = (h for h in self._hands if len(h.items) > 1 and now - h.since > _STUCK_S)
                other = None if hand.items else next(stuck, None)
                if other is not None:
                    first, *found = other.items.values()
                    for item in found:
                        other.cancel(item.identity)
                    other.items = {first.identity: first}
                elif not any(item.is_suspect for item in hand.items.values()):
                    share = max(1, len(self._waiting) // (2 * len(self._hands)))
                    room = min(share, _HANDFUL - len(hand.items))
                    while self._waiting and len(found) < room:
                        item = self._waiting[0]
                        if item.is_suspect and (found or hand.items) and not item.future.cancelled():
                            break
                        self._waiting.popleft()
                        if not item.future.cancelled():
                            found.append(item)
                            if item.is_suspect:
                                break
                    self._has_room.notify(len(found))
                if not hand.items:
                    hand.since = now
                for item in found:
                    item.identity = next(self._identities)
                    item.future.is_taken = True
                    hand.items[item.identity] = item
                if found or hand.items:
                    return found
                others_have_spare = any(len(other.items) > 1 for other in self._hands)
                self._has_work.wait(_STUCK_S if others_have_spare else None)
            return []

    def finish(self, worker: int, identity: int) -> QueuedProgram | None:
        """Remove and return the program ``identity`` of ``worker``; None if the worker no longer holds it."""
        with self._lock:
            hand = self._hands[worker]
            hand.since = time.monotonic()
            return hand.items.pop(identity, None)

    def drop(self, worker: int) -> list[QueuedProgram]:
        """Remove and return all programs that ``worker`` holds."""
        with self._lock:
            dropped, self._hands[worker].items = self._hands[worker].items, {}
            return list(dropped.values())

    def put_back(self, items: list[QueuedProgram]) -> None:
        """Queue programs again, in front of all others."""
        with self._lock:
            self._waiting.extendleft(reversed(items))
            self._has_work.notify(len(items))

    def _stop(self, future: ProgramFuture) -> None:
        """Tell the worker that has the program of a cancelled future."""
        with self._lock:
            for hand in self._hands:
                for item in hand.items.values():
                    if item.future is future:
                        hand.cancel(item.identity)
                        del hand.items[item.identity]
                        return
            self._has_room.notify()

    def close(self) -> list[QueuedProgram]:
        """Refuse further programs and wake every waiting thread; return the programs that waited."""
        with self._lock:
            self.is_closed = True
            self._has_room.notify_all()
            self._has_work.notify_all()
            waiting, self._waiting = list(self._waiting), deque()
            return waiting
