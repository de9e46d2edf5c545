"""Alerts: events that need attention at once, as a log line and to a webhook.

An alert is an event of the guard, or an alarm of any controller. Posting happens in a background thread with
a bounded queue: a server that hangs or refuses costs alerts, never the run.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from multitask_rl.boundary.posting import open_request
from multitask_rl.records import Event, Scored
from multitask_rl.tracking.lines import dump_line, event_to_dict

__all__ = ["TOKEN_VARIABLE", "AlertTracker", "is_alert"]

TOKEN_VARIABLE = "MULTITASK_RL_WEBHOOK_TOKEN"
"""Environment variable with the token sent as ``Authorization: Bearer ...``."""

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 5.0
_FLUSH_S = 10.0
"""Longest wait for the queue at the end of a run."""
_MAX_QUEUED = 100


def is_alert(event: Event) -> bool:
    """Whether ``event`` is an alert (see the module)."""
    return event.source == "guard" or event.kind == "alarm"


class AlertTracker:
    """Writes a log line for every alert, with ``logs``, and posts it to ``webhook``, if given; a ``Tracker``.

    The body is the event as ``events.jsonl`` has it (``step``, ``source``, ``kind``, ``reason``, ``task``,
    ``data``) with ``run``, the output directory.
    """

    run_id: str | None = None

    def __init__(self, output_dir: Path, webhook: str = "", *, logs: bool = True) -> None:
        self._run = str(output_dir)
        self._webhook = _Webhook(webhook) if webhook else None
        self._logs = logs

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """Nothing to open."""

    def log_event(self, event: Event) -> None:
        """Pass an alert on."""
        if not is_alert(event):
            return
        if self._logs:
            _LOG.warning("%s %s at step %d: %s", event.source, event.kind, event.step, event.reason)
        if self._webhook is not None:
            self._webhook.put(dump_line({**event_to_dict(event), "run": self._run}))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Nothing: numbers are no alerts."""

    def log_rollouts(self, scored: Sequence[Scored], step: int) -> None:
        """Nothing: rollouts are no alerts."""

    def finish(self, status: str) -> None:
        """Send what is queued (at most 10 seconds). A second call does nothing."""
        webhook, self._webhook = self._webhook, None
        if webhook is not None:
            webhook.close()


class _Webhook(threading.Thread):
    """Posts lines in order."""

    def __init__(self, url: str) -> None:
        super().__init__(name="webhook", daemon=True)
        self._url = url
        # the address may hold a secret: only the host is ever written to the log
        self._host = urlsplit(url).hostname
        self._queue: queue.Queue[str | None] = queue.Queue(maxsize=_MAX_QUEUED)
        self._num_lost = 0
        self.start()

    def put(self, line: str) -> None:
        """Queue a line; never blocks."""
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._num_lost += 1

    def close(self) -> None:
        """Send what is queued, within the time limit."""
        try:
            self._queue.put(None, timeout=_FLUSH_S)
            self.join(_FLUSH_S)
        except queue.Full:
            pass
        left = self._queue.qsize() if self.is_alive() else 0
        if self._num_lost or left:
            _LOG.warning("%d alerts did not reach the webhook at %s", self._num_lost + left, self._host)

    def run(self) -> None:
        """Work until ``None`` comes."""
        while (line := self._queue.get()) is not None:
            try:
                self._post(line)
            except Exception as error:  # noqa: BLE001 - an alert is worth less than the run
                self._num_lost += 1
                _LOG.warning("the webhook at %s failed, the run goes on: %r", self._host, error)

    def _post(self, line: str) -> None:
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN_VARIABLE):
            headers["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(self._url, line.encode(), headers, method="POST")
        with open_request(request, timeout=_TIMEOUT_S):
            pass
