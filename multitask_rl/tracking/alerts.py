"""Alerts: events of the guard, alarms of any controller, a failed run; as a log line and to a webhook.

A server that hangs or refuses costs alerts, never the run.
"""

from __future__ import annotations

import logging
import os
import urllib.request
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

from multitask_rl.boundary.posting import open_request
from multitask_rl.records import Event
from multitask_rl.tracking.background import BackgroundWriter
from multitask_rl.tracking.base import Tracker
from multitask_rl.tracking.jsonl import dump_line

TOKEN_VARIABLE = "MULTITASK_RL_WEBHOOK_TOKEN"
"""Environment variable with the token sent as ``Authorization: Bearer ...``."""

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 5.0
_FLUSH_S = 10.0
"""Longest wait for the queue at the end of a run."""
_MAX_QUEUED = 100


class AlertTracker(Tracker):
    """Logs every alert if ``logs``, and posts it to ``webhook`` if that is not empty.

    The body is the event as ``events.jsonl`` has it, with ``run``, the output directory.
    """

    def __init__(self, output_dir: Path, webhook: str = "", *, logs: bool = True) -> None:
        self._run, self._url, self._logs = str(output_dir), webhook, logs
        self._writer: BackgroundWriter | None = None
        if webhook:
            # the address may hold a secret: the log gets the host alone
            target = f"the webhook at {urlsplit(webhook).hostname}"
            self._writer = BackgroundWriter(
                target, self._post, max_per_batch=1, max_queued=_MAX_QUEUED, max_failures=None
            )
            self._writer.start()

    def log_event(self, event: Event) -> None:
        """Log and post ``event`` if it is an alert."""
        if event.source != "guard" and event.kind not in ("alarm", "failed"):
            return
        if self._logs:
            task = f" [{event.task}]" if event.task else ""
            _LOG.warning("%s %s%s at step %d: %s", event.source, event.kind, task, event.step, event.reason)
        if self._writer is not None:
            self._writer.put([dump_line({**asdict(event), "run": self._run})])

    def _post(self, lines: list[str]) -> None:
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN_VARIABLE):
            headers["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(self._url, "".join(lines).encode(), headers, method="POST")
        with open_request(request, timeout=_TIMEOUT_S):
            pass

    def finish(self, status: str) -> None:
        """Send what is queued (at most 10 seconds). A second call does nothing."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        writer.close(_FLUSH_S)
        if writer.num_failed:
            _LOG.warning("%d alerts did not reach %s", writer.num_failed, writer.name)
