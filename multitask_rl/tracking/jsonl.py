"""Tracker that appends JSON lines to the output directory: metrics, events, rollouts.

The plainest record of a run and the one that ``report``, ``compare`` and ``rescore`` read. A line is written
whole and flushed; a last line that a kill cut in half is dropped on resume.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from multitask_rl.config.run import TrackingConfig
from multitask_rl.records import Event, Scored
from multitask_rl.tracking.lines import dump_line, event_to_dict, scored_to_dict

__all__ = ["JsonlTracker", "cut_after_step"]

_FILES = ("metrics.jsonl", "events.jsonl", "rollouts.jsonl")


def cut_after_step(path: Path, step: int) -> int:
    """Drop the lines of ``path`` whose ``step`` is later than ``step``, and torn lines; return how many.

    The file is replaced atomically. Missing file: nothing to do.
    """
    if not path.exists():
        return 0
    temporary = path.with_name(path.name + ".tmp")
    num_dropped = 0
    with path.open(encoding="utf-8", errors="replace") as old, temporary.open("w", encoding="utf-8") as new:
        for line in old:
            if line.endswith("\n") and _step_of(line, default=step + 1) <= step:
                new.write(line)
            else:
                num_dropped += 1
        new.flush()
        os.fsync(new.fileno())
    if num_dropped:
        temporary.replace(path)
    else:
        temporary.unlink()
    return num_dropped


def _step_of(line: str, *, default: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return default


class JsonlTracker:
    """Writes what it is given; see the module's docstring."""

    def __init__(self, output_dir: Path, config: TrackingConfig, run_id: str | None) -> None:
        self.run_id = run_id
        self._directory = Path(output_dir)
        self._store_rollouts = config.store_rollouts
        self._open: dict[str, TextIO] = {}

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """Cut the files to ``resume_step``; a new run moves an older run's files to ``previous-<n>/``."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            self._set_aside()
        else:
            for name in _FILES:
                cut_after_step(self._directory / name, resume_step)

    def _set_aside(self) -> None:
        old = [path for name in _FILES if (path := self._directory / name).exists()]
        if not old:
            return
        index = 1
        while (target := self._directory / f"previous-{index}").exists():
            index += 1
        target.mkdir()
        for path in old:
            shutil.move(path, target / path.name)

    def _append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        if name not in self._open:
            self._open[name] = (self._directory / name).open("a", encoding="utf-8")
        stream = self._open[name]
        stream.writelines(dump_line(record) for record in records)
        stream.flush()

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

    def log_artifact(self, path: Path) -> None:
        """Do nothing: files already are in the output directory."""

    def finish(self, status: str) -> None:
        """Close the files."""
        for stream in self._open.values():
            stream.close()
        self._open.clear()
