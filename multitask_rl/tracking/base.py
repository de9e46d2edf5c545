"""What a tracker is. Tracking never raises into the run: a tracker that fails is reported once and left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from multitask_rl.records import Event, Scored

__all__ = ["Tracker"]


class Tracker(Protocol):
    """Receives what the run knows. Built as ``Cls(output_dir=..., config=TrackingConfig, run_id=str | None)``."""

    run_id: str | None
    """Identity that a resumed run continues (kept in the checkpoint); None = has none."""

    def start(self, parameters: Mapping[str, Any]) -> None:
        """Open the run; ``parameters`` is the resolved configuration, nested."""
        ...

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Numbers of one step: ``task/<name>/...``, ``macro/...``, ``worst/...``, ``time/...``."""
        ...

    def log_event(self, event: Event) -> None:
        """One decision of a controller."""
        ...

    def log_rollouts(self, scored: Sequence[Scored], step: int) -> None:
        """A sample of the step's scored rollouts."""
        ...

    def log_artifact(self, path: Path) -> None:
        """Keep a file with the run."""
        ...

    def finish(self, status: str) -> None:
        """Close: ``finished``, ``failed`` or ``stopped``."""
        ...
