"""A background thread that writes to a server: in order, in batches, without blocking the run."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from multitask_rl.lazy import without_collector

_LOG = logging.getLogger(__name__)
MAX_PER_BATCH = 1000
"""Points that one write takes."""
_REST_S = 60.0
"""Between two tries of a server that refuses."""
_LONGEST, _GROWS_S = 4.0, 300.0
"""Largest factor on the time that points wait; seconds in which the factor grows by 1."""


class BackgroundWriter(threading.Thread):
    """Runs queued calls in order; joins neighbouring points into batches.

    Args:
        target: name of the server, for messages.
        log: writes a batch of points.
        max_per_batch: most points of a batch.
        gather_s: most seconds that points wait for others: one large write costs less than many small ones.
            It grows to four times as much in a quarter of an hour.
        max_queued: most calls and lists of points that wait.
        max_failures: after so many failures in a row, one write a minute is tried and the
            others are lost; None = all are tried.
        is_local: writes take milliseconds; garbage collection, which takes longer, waits for their end.
        opens: connects to the server. It is called before each write until it succeeds, first after
            a minute or ``try_again``. Writes before its success are lost.
    """

    def __init__(
        self,
        target: str,
        log: Callable[[list[Any]], None],
        *,
        max_per_batch: int = MAX_PER_BATCH,
        gather_s: float = 0.0,
        max_queued: int = 10_000,
        max_failures: int | None = 5,
        is_local: bool = False,
        opens: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(name=target, daemon=True)
        self._collector = without_collector if is_local else contextlib.nullcontext
        self._log, self._max_per_batch, self._max_failures = log, max_per_batch, max_failures
        self._gather_s, self._opens = gather_s, opens
        self._queue: queue.Queue[Callable[[], None] | list[Any] | None] = queue.Queue(maxsize=max_queued)
        self.num_failed = 0
        """Points and calls that were lost."""
        self._num_failed_in_row, self._is_told = 0, False
        self._resting_until_s = 0.0 if opens is None else time.monotonic() + _REST_S

    def put(self, item: Callable[[], None] | list[Any]) -> None:
        """Queue a call or points; never blocks: a full queue (a server that hangs) loses the item."""
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.num_failed += len(item) if isinstance(item, list) else 1

    def try_again(self) -> None:
        """Try the next write, however many before it failed."""
        self._resting_until_s = 0.0

    def close(self, timeout_s: float) -> None:
        """Write the queued items; items left after ``timeout_s`` are lost."""
        until_s = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
            self.join(max(0.0, until_s - time.monotonic()))
        if self.is_alive():
            self.num_failed += 1  # the write under way
            with contextlib.suppress(queue.Empty):
                while True:
                    item = self._queue.get_nowait()
                    self.num_failed += len(item) if isinstance(item, list) else item is not None

    def run(self) -> None:
        """Make the queued calls in order; end when ``None`` comes out of the queue."""
        points: list[Any] = []
        until_s, began_s = 0.0, time.monotonic()
        item: Callable[[], None] | list[Any] | None = []
        while item is not None:
            item = []
            with contextlib.suppress(queue.Empty):
                item = self._queue.get(timeout=max(0.0, until_s - time.monotonic()) if points else None)
            if isinstance(item, list):
                if not points:
                    now = time.monotonic()
                    until_s = now + self._gather_s * min(_LONGEST, 1 + (now - began_s) / _GROWS_S)
                points = points + item
                if item and len(points) < self._max_per_batch:
                    continue
            if points:
                self._attempt(partial(self._log, points), len(points))
                points = []
            if callable(item):
                self._attempt(item, 1)

    def _attempt(self, call: Callable[[], None], size: int) -> None:
        if time.monotonic() < self._resting_until_s:
            self.num_failed += size
            return
        try:
            if self._opens is not None:
                self._opens()
                self._opens = None
            with self._collector():
                call()
            self._num_failed_in_row = 0
        except Exception as error:  # noqa: BLE001 - numbers are worth less than the run
            if not self._is_told:
                self._is_told = True
                text = "%s refused a write (the run goes on; further refusals are counted): %.300r"
                _LOG.warning(text, self.name, error)
            self.num_failed += size
            self._num_failed_in_row += 1
            if self._max_failures is not None and self._num_failed_in_row >= self._max_failures:
                self._resting_until_s = time.monotonic() + _REST_S
                if self._num_failed_in_row == self._max_failures:
                    text = "%s refused %d writes in a row; one is tried every %.0f s from here on"
                    _LOG.warning(text, self.name, self._max_failures, _REST_S)
