"""Tracker that appends JSON lines to the output directory: metrics, events, rollouts.

``report``, ``compare`` and ``rescore`` read these records. A record that cannot be written ends the run.
``record_files`` cuts records of a former run, or sets them aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from multitask_rl.config.run import TrackingConfig
from multitask_rl.records import Event, Scored
from multitask_rl.tracking.base import Tracker
from multitask_rl.tracking.lines import dump_line, scored_to_dict
from multitask_rl.tracking.record_files import RecordFile


class JsonlTracker(Tracker):
    """Writes what it is given."""

    def __init__(self, output_dir: Path, config: TrackingConfig, run_id: str | None) -> None:
        self._directory = output_dir
        self._open: dict[str, RecordFile] = {}

    def _append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        if name not in self._open:
            self._open[name] = RecordFile(self._directory / name)
        self._open[name].append(dump_line(record) for record in records)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line: the step and every metric by name."""
        self._append("metrics.jsonl", [{"step": step, **metrics}])

    def log_event(self, event: Event) -> None:
        """Append one line."""
        self._append("events.jsonl", [asdict(event)])

    def log_rollouts(self, scored: Sequence[Scored], step: int) -> None:
        """Append one line each."""
        if scored:
            self._append("rollouts.jsonl", (scored_to_dict(item, step) for item in scored))

    def finish(self, status: str) -> None:
        """Close the files."""
        for stream in self._open.values():
            stream.close()
        self._open.clear()
