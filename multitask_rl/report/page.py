"""``multitask-rl report RUN --html FILE``: curves, decisions and stored samples of a run in one HTML file."""

from __future__ import annotations

import base64
import json
import math
import statistics
import zlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from multitask_rl.tracking.console import ALARM_KINDS
from multitask_rl.tracking.jsonl import dump_line
from multitask_rl.tracking.reading import RunRecord, read_lines

_TASK_METRICS = ("reward_mean", "weight", "kl", "length", "rejection_rate", "failure_rate")
_MOST_POINTS = 400
"""Of one curve; of longer ones every n-th step is shown, and the last."""
_SAMPLE_BYTES = 6_000_000
"""Of compressed samples, which keeps the page under 8 MB."""
_SAMPLE_KEYS = ("step", "task", "prompt_id", "draw", "sample", "attempt", "prompt", "response", "reward")
_JUDGED_KEYS = ("breakdown", "failure", "finish_reason", "rejected", "verdicts", "turns")


def render_page(run: RunRecord, result: Mapping[str, Any], directory: Path) -> str:
    """Return the page of the run in ``directory``; ``result`` is what the command prints as text.

    Raises:
        ConfigError: a record cannot be read.
    """
    samples, left_out = _packed_samples(directory / "rollouts.jsonl")
    data = {
        "result": result,
        "config": run.config,
        "alarms": [event for event in run.events if event["kind"] in ALARM_KINDS],
        "curves": _curves(run, directory),
        "samples": samples,
        "samples_left_out": left_out,
    }
    # no text of a response may end the script element or begin a comment in it
    embedded = dump_line(data).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    template = files("multitask_rl.report").joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("@DATA@", embedded)


def _curves(run: RunRecord, directory: Path) -> dict[str, dict[str, list[list[float]]]]:
    """Return title -> task -> points: [step, value], of held-out means [step, mean, half an interval]."""
    found: dict[str, dict[str, dict[int, list[float]]]] = {"held out": {}}
    for task, history in run.evaluations.items():
        own = found["held out"].setdefault(task, {})
        for evaluation in history:
            values = [value for value in evaluation.values if math.isfinite(value)]
            if values:
                spread = statistics.stdev(values) if len(values) > 1 else math.nan
                half = 1.96 * spread / math.sqrt(len(values))
                own[evaluation.step] = [evaluation.step, statistics.fmean(values), half]
    for line in read_lines(directory / "metrics.jsonl", lambda line: {**line, "step": int(line["step"])}):
        for key, value in line.items():
            area, *rest = key.split("/", 2)
            if area == "task" and len(rest) == 2 and rest[1] in _TASK_METRICS and value is not None:
                own = found.setdefault(rest[1], {}).setdefault(rest[0], {})
                own[line["step"]] = [line["step"], float(value)]
    return {
        title: {task: _thin(list(points.values())) for task, points in tasks.items()}
        for title, tasks in found.items()
    }


def _thin(points: list[list[float]]) -> list[list[float]]:
    stride = math.ceil(len(points) / _MOST_POINTS)
    return points if stride < 2 else [*points[:-1:stride], points[-1]]


def _packed_samples(path: Path) -> tuple[str, int]:
    """Return the newest stored samples (JSON list, deflate, base64), and how many older ones are left out."""

    def chosen(line: Mapping[str, Any]) -> dict[str, Any]:
        return {key: line[key] for key in (*_SAMPLE_KEYS, *_JUDGED_KEYS) if key in line}

    samples = list(read_lines(path, chosen))
    kept = samples
    while True:
        packed = base64.b64encode(zlib.compress(json.dumps(kept).encode())).decode()
        if len(packed) <= _SAMPLE_BYTES:
            return packed, len(samples) - len(kept)
        kept = kept[len(kept) // 4 + 1 :]
