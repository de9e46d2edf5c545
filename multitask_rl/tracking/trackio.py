"""Tracker that writes to trackio by its own client (extra ``trackio``); ``trackio show`` opens its pages.

Without ``TRACKIO_SPACE_ID`` all stays on this machine, in the client's directory (``TRACKIO_DIR``). A resumed
run goes on under the same name, and numbers of a step that the killed run had written are left out. Of the
steps that a rollback undid, the store has both courses.
"""

from __future__ import annotations

import contextlib
import io
import uuid
from collections.abc import Mapping
from typing import Any

from multitask_rl.tracking.base import DashboardTracker


class TrackioTracker(DashboardTracker):
    """trackio: numbers with their steps; some samples as tables; alarms and stops as alerts."""

    client = "trackio"

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """Begin the run, or go on with the one named ``run_id``."""
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        project, self._table = self._config.experiment, trackio.Table
        # a name is all that the client finds a run by, so that a new one needs its own
        name = self.run_id or f"{self._config.run_name or self._directory.name}-{uuid.uuid4().hex[:4]}"
        with contextlib.redirect_stdout(io.StringIO()):  # it prints how to open its pages
            self._run = trackio.init(
                project=project,
                name=name,
                config=dict(parameters),
                resume="allow" if self.run_id else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        if self.run_id is not None:
            last = SQLiteStorage.get_max_step_for_run(project, run=name)
            self._is_there = -1 if last is None else int(last)
        self.run_id = name

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, status: str) -> None:
        """Write what is left."""
        if self._run is not None:
            with contextlib.redirect_stdout(io.StringIO()):
                self._run.finish()
