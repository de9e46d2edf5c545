"""A background thread that writes to a server: in order, in batches, without blocking the run."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["MAX_PER_BATCH", "BackgroundWriter"]

_LOG = logging.getLogger(__name__)
MAX_PER_BATCH = 1000
"""Points that one write takes."""
_MAX_FAILURES = 5


class BackgroundWriter(threading.Thread):
    """Runs calls in order, joins neighbouring points into batches; after five failures in a row it stops."""

    def __init__(self, log: Callable[[list[Any]], None]) -> None:
        super().__init__(name="mlflow-tracker", daemon=True)
        self._log = log
        self._queue: queue.Queue[Callable[[], None] | list[Any] | None] = queue.Queue(maxsize=10_000)
        self.num_failed = 0
        self._num_failed_in_row = 0

    def put(self, item: Callable[[], None] | list[Any]) -> None:
        """Queue a call or metrics; never blocks: a full queue (a server that hangs) loses the item."""
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.num_failed += _size(item)

    def close(self, timeout_s: float) -> None:
        """Write the queued items; items left after ``timeout_s`` are lost."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
            self.join(timeout_s)
        if self.is_alive():
            self.num_failed += 1  # the write under way
            with contextlib.suppress(queue.Empty):
                while True:
                    self.num_failed += _size(self._queue.get_nowait())

    def run(self) -> None:
        """Work until ``None`` comes."""
        item = self._queue.get()
        while item is not None:
            following = None
            if isinstance(item, list):
                item, following = self._drain(item)
                self._attempt(self._log, item)
            else:
                self._attempt(item)
            item = following or self._queue.get()

    def _drain(self, metrics: list[Any]) -> tuple[list[Any], Callable[[], None] | None]:
        """Return all metrics queued up to the next call, and that call."""
        while len(metrics) < MAX_PER_BATCH:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if item is None:
                self._queue.put(None)
                break
            if not isinstance(item, list):
                return metrics, item
            metrics = metrics + item
        return metrics, None

    def _attempt(self, call: Callable[..., None], *arguments: Any) -> None:
        size = _size(arguments[0] if arguments else call)
        if self._num_failed_in_row >= _MAX_FAILURES:
            self.num_failed += size
            return
        try:
            call(*arguments)
            self._num_failed_in_row = 0
        except Exception as error:  # noqa: BLE001 - numbers are worth less than the run
            is_first = self.num_failed == 0
            self.num_failed += size
            self._num_failed_in_row += 1
            if is_first:
                _LOG.warning(
                    "MLflow refused a write (the run goes on; later refusals are counted): %r", error
                )
            if self._num_failed_in_row == _MAX_FAILURES:
                _LOG.warning("MLflow refused %d writes in a row; nothing more is sent to it", _MAX_FAILURES)


def _size(item: Callable[[], None] | list[Any] | None) -> int:
    """Return how many writes ``item`` is: points, or one call."""
    return len(item) if isinstance(item, list) else int(item is not None)
