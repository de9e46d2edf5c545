"""When each stage worked and when the update waited: ``timeline.jsonl``, and shares of each step.

One line per span: ``stage``, ``task`` (empty: several), ``step`` (1 = the first), ``start`` and ``end`` in
seconds since the run was opened. Stages: ``rollout``, ``constraints``, ``rewards``, ``advantages``,
``update``; ``step`` is the whole step, ``wait/<stage>`` a wait of the update for that stage.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from multitask_rl.tracking.jsonl import RecordFile, dump_line, whole_records

Span = tuple[float, float]
"""Begin and end, ``time.monotonic`` seconds."""
WAIT = "wait/"


class Timeline:
    """Collects the spans of a step and appends them to ``path`` when it ends; None: nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self._began = time.monotonic()
        self._path = path
        self._stages: set[str] = set()
        """Stages that worked in some step: each later step has a share of them, if only 0."""
        self._spans: list[tuple[str, str, int, Span]] = []
        self._busy: dict[int, dict[str, list[Span]]] = {}
        """Step -> stage -> spans, until the step ends."""
        self._file: RecordFile | None = None
        self._zero = 0.0

    def begin_step(self) -> None:
        """Begin a step: time before it (evaluation, a checkpoint) is in no step's shares."""
        self._began = time.monotonic()

    def add(self, stage: str, span: Span, *, step: int, task: str = "") -> None:
        """Record that ``stage`` worked (``wait/<stage>``: that the update waited for it) during ``span``."""
        self._spans.append((stage, task, step, span))
        self._busy.setdefault(step, {}).setdefault(stage, []).append(span)

    def end_step(
        self, step: int, running: Iterable[tuple[str, Span]] = ()
    ) -> tuple[dict[str, float], dict[str, float]]:
        """End the step and write the spans. Returns two dicts.

        The first: for each stage its seconds of work (or of waiting) for ``step``, whenever they were; key
        ``step``: the length of the step. The second: ``utilisation/<stage>`` and ``waits_for/<stage>``, the
        share of that length in which the stage worked or was waited for, for whichever step.

        ``running``: stage and span so far of unfinished work for later steps, which record it themselves.
        """
        now = time.monotonic()
        seconds = {stage: busy_seconds(spans) for stage, spans in self._busy.pop(step, {}).items()}
        seconds["step"] = now - self._began
        whole, length = (self._began, now), max(now - self._began, 1e-9)
        by_stage: dict[str, list[Span]] = {stage: [] for stage in sorted(self._stages)}
        for stage, span in [*((stage, span) for stage, _, _, span in self._spans), *running]:
            by_stage.setdefault(stage, []).extend(intersect([span], [whole]))
        self._stages |= by_stage.keys()
        numbers = {}
        for stage, spans in by_stage.items():
            waited = stage.startswith(WAIT)
            name = f"waits_for/{stage.removeprefix(WAIT)}" if waited else f"utilisation/{stage}"
            numbers[name] = busy_seconds(spans) / length
        self._spans.append(("step", "", step, whole))
        self._write()
        return seconds, numbers

    def _write(self) -> None:
        spans, self._spans = self._spans, []
        if self._path is None or not spans:
            return
        if self._file is None:  # not before: a resumed run first cuts the file to its checkpoint
            ended = 0.0  # the clock goes on from the last line
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._path.open("rb") as lines:
                for span_before in whole_records(lines):
                    ended = max(ended, float(span_before.get("end", 0.0)))
            self._zero = min(start for *_, (start, _) in spans) - ended
            self._file = RecordFile(self._path)
        found = []
        for stage, task, step, span in spans:
            start, end = (round(at - self._zero, 6) for at in span)
            record = {"stage": stage, "task": task, "start": start, "end": end, "step": step + 1}
            found.append(dump_line(record))
        self._file.append(found)

    def close(self) -> None:
        """Write the remaining spans and close the file. Idempotent."""
        self._write()
        if self._file is not None:
            self._file.close()
            self._file = None


def merge(spans: Iterable[Span]) -> list[Span]:
    """Return the union as disjoint spans in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def subtract(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """Return the time in ``spans`` and not in ``others``."""
    left = merge(spans)
    for start, end in merge(others):
        left = [part for a, b in left for part in ((a, min(b, start)), (max(a, end), b)) if part[0] < part[1]]
    return left


def intersect(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the time in both."""
    return subtract(spans, subtract(spans, others))


def busy_seconds(spans: Iterable[Span]) -> float:
    """Return the length of the union."""
    return sum(end - start for start, end in merge(spans))


def summarise(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return per stage of ``timeline.jsonl`` ``busy`` and ``waited``, shares of all steps' time.

    ``waited``: the update waited for the stage. What a stage did for one task is counted in the stage and,
    after it, as ``<stage>/<task>``.
    """
    busy: dict[str, list[Span]] = {"step": []}
    waits: dict[str, float] = {}
    tasks: dict[str, list[str]] = {}
    for line in lines:
        stage, task, start, end = line["stage"], line["task"], float(line["start"]), float(line["end"])
        base = stage.removeprefix(WAIT)
        names = [base, f"{base}/{task}"] if task else [base]
        own = tasks.setdefault(base, [])
        own += (name for name in names[1:] if name not in own)
        for name in names:
            if stage.startswith(WAIT):
                waits[name] = waits.get(name, 0.0) + end - start
            else:
                busy.setdefault(name, []).append((start, end))
    steps = busy.pop("step")
    if (total := busy_seconds(steps)) <= 0.0:
        return {}
    # the time in both is the sum of the parts less the union
    shares = {n: (busy_seconds(own) + total - busy_seconds(own + steps)) / total for n, own in busy.items()}
    named = [name for base, own in tasks.items() if base != "step" for name in (base, *own)]
    return {n: {"busy": shares.get(n, 0.0), "waited": waits.get(n, 0.0) / total} for n in named}
