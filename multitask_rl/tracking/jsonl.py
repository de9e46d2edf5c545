"""Tracker that appends JSON lines to the output directory: metrics, events, rollouts.

The plainest record of a run and the one that ``report``, ``compare`` and ``rescore`` read. It is part of the
run: what cannot be written ends it (``record_files``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from multitask_rl.config.run import TrackingConfig
from multitask_rl.records import Event, Scored
from multitask_rl.tracking.lines import dump_line, event_to_dict, scored_to_dict
from multitask_rl.tracking.record_files import RecordFile

__all__ = ["JsonlTracker"]


class JsonlTracker:
    """Writes what it is given; see the module's docstring."""

    def __init__(self, output_dir: Path, config: TrackingConfig, run_id: str | None) -> None:
        self.run_id = run_id
        self._directory = Path(output_dir)
        self._store_rollouts = config.store_rollouts
        self._open: dict[str, RecordFile] = {}

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """Nothing to open: the run cuts or sets aside what was recorded before."""

    def _append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        if name not in self._open:
            self._open[name] = RecordFile(self._directory / name)
        self._open[name].append(dump_line(record) for record in records)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line: the step and every metric by name."""
        self._append("metrics.jsonl", [{"step": step, **metrics}])

    def log_event(self, event: Event) -> None:
        """Append one line."""
        self._append("events.jsonl", [event_to_dict(event)])

    def log_rollouts(self, scored: Sequence[Scored], step: int) -> None:
        """Append ``store_rollouts`` of each task, spread evenly over its list (-1: all)."""
        by_task: dict[str, list[Scored]] = {}
        for item in scored:
            by_task.setdefault(item.rollout.task, []).append(item)
        lines = []
        for items in by_task.values():
            size = len(items)
            num_kept = size if self._store_rollouts < 0 else min(size, self._store_rollouts)
            lines += [scored_to_dict(items[index * size // num_kept], step) for index in range(num_kept)]
        if lines:
            self._append("rollouts.jsonl", lines)

    def finish(self, status: str) -> None:
        """Close the files."""
        for stream in self._open.values():
            stream.close()
        self._open.clear()
