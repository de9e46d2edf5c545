"""Base of trackers. Tracking never raises into the run: a failing tracker is reported once and left out.

Names of metrics: ``task/<name>/<metric>`` (one task), ``macro/<metric>`` (mean over tasks),
``worst/<metric>`` (the worst task), ``eval/<task>/<constraint>/<metric>`` (a held-out limit),
``time/<name>_s`` and ``time/<things>_per_s``, else ``<area>/<metric>``.
The console shows these per task where they are given: ``reward_mean``, ``weight``, ``share_requested``,
``share_sampled``, ``share_trained``, ``informative_rate``, ``rejection_rate``, ``samples_per_s``, ``eval``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from multitask_rl.records import Event, Scored

__all__ = ["Tracker"]


class Tracker(Protocol):
    """Receives metrics, events and rollouts of a run.

    Built as ``Cls(output_dir=Path, config=TrackingConfig, run_id=str | None)``.
    """

    run_id: str | None
    """Identity that a resumed run continues (kept in the checkpoint); None = has none."""

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """Open the run.

        Args:
            parameters: the resolved configuration, nested.
            resume_step: the last step the checkpoint holds (0: the run was killed before its first); what an
                aborted run logged after it is dropped where the medium allows it. None = a new run.
        """
        ...

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Numbers of one step, under the names of this module's docstring."""
        ...

    def log_event(self, event: Event) -> None:
        """One decision of a controller."""
        ...

    def log_rollouts(self, scored: Sequence[Scored], step: int) -> None:
        """All scored rollouts of the step; the tracker keeps ``store_rollouts`` of each task."""
        ...

    def finish(self, status: str) -> None:
        """Close: ``finished``, ``failed`` or ``stopped``."""
        ...
