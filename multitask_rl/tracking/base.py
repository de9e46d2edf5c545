"""Base of trackers.

Names of metrics: ``task/<name>/<metric>`` (one task), ``macro/<metric>`` (mean over tasks),
``worst/<metric>`` (the worst task), ``eval/<task>/<constraint>/<metric>`` (a held-out limit),
``time/<name>_s`` and ``time/<things>_per_s``, else ``<area>/<metric>``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from multitask_rl.records import Event, Scored


class Tracker:
    """Receives metrics, events and rollouts of a run; each method does nothing until it is overridden.

    Built as ``Cls(output_dir=Path, config=TrackingConfig, run_id=str | None)``. A tracker that raises is
    reported once and gets no further calls; the run goes on.
    """

    run_id: str | None = None
    """Identity that a resumed run continues (kept in the checkpoint); None = has none."""

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """Open the run.

        Args:
            parameters: the resolved configuration, nested.
            resume_step: the last step the checkpoint holds (0: the run was killed before its first); the
                tracker drops later records of the killed run if its medium allows it. None = a new run.
        """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the numbers of one step, or of an evaluation after it."""

    def log_event(self, event: Event) -> None:
        """Record one decision of a controller."""

    def log_rollouts(self, scored: Sequence[Scored], step: int) -> None:
        """Record scored rollouts of the step: ``tracking.store_rollouts`` of each task."""

    def finish(self, status: str) -> None:
        """Close: ``finished``, ``failed`` or ``stopped``."""
