"""What one run says of itself: tasks before and after, constraints, shares, stages, events."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from multitask_rl.errors import ConfigError
from multitask_rl.report.differences import Pair, difference_rows, measure_the_same, share_prompts
from multitask_rl.report.influence import influence, turnover
from multitask_rl.statistics.definitions import is_comparable, measured
from multitask_rl.tracking.reading import Evaluation, RunRecord, read_run

logger = logging.getLogger(__name__)


def summarise_run(run: RunRecord) -> dict[str, Any]:
    """Return what ``report`` says of one run."""
    return {
        "run": run.name,
        "tasks": task_rows(run),
        "changes": run_changes(run),
        "influence": influence(run),
        "turnover": turnover(run),
        "constraints": _constraints(run),
        "weights": {task: {str(step): w for step, w in own.items()} for task, own in run.weights.items()},
        "stages": run.stages,
        "events": run.events,
    }


def task_rows(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Return a row per task: its last evaluation against the first one of the same metric and definition."""
    pairs, more = {}, dict[str, dict[str, Any]]()
    for task, history in run.evaluations.items():
        last = history[-1]
        alike = [e for e in history if measure_the_same(e, last)]
        more[task] = {"left_out": [e.step for e in history if not measure_the_same(e, last)]}
        if len(alike) > 1:
            pairs[task] = Pair([alike[0]], [last], share_prompts(run, run, alike[0], last))
        else:
            pairs[task] = Pair([replace(last, values=[])], [last], paired=False)
            more[task]["steps"] = [None, last.step]
    rows = {task: {**row, **more[task]} for task, row in difference_rows(pairs).items()}
    if isinstance(tasks := run.config.get("tasks"), Mapping):
        for task in rows.keys() - tasks.keys():
            gone = f"removed from the run after step {rows[task]['steps'][-1]}"
            rows[task]["reason"] = "; ".join(filter(None, (gone, rows[task]["reason"])))
    for row in rows.values():
        if row["left_out"]:
            steps = ", ".join(map(str, row["left_out"]))
            told = (
                f"not compared with the evaluations at steps {steps}, which were not judged by "
                f"{row['metric']!r} of the same definition and direction, on the same prompts and with the "
                "same sampling"
            )
            row["reason"] = "; ".join(filter(None, (told, row["reason"])))
    return rows


def rows_at_end(directory: Path, step: int) -> dict[str, dict[str, Any]]:
    """Return ``task_rows`` of all tasks if at least one was evaluated at ``step``, the last; else no rows.

    Records that are missing or cannot be read have no rows either.
    """
    if not (directory / "evaluations.jsonl").is_file():
        return {}
    try:
        rows = task_rows(read_run(directory, whole=False))
    except ConfigError as error:  # the run has ended well all the same
        logger.warning("the first evaluation is not compared with the last: %s", error)
        return {}
    return rows if any(row["steps"][-1] == step for row in rows.values()) else {}


def run_changes(run: RunRecord, *, all_tasks: bool = False) -> list[dict[str, Any]]:
    """Return what training changed in tasks that it did not train on: primary metric, ``kl``, ``turnover``.

    With ``all_tasks`` also in those that it trained on.
    """
    trained = [task for task, weights in run.weights.items() if any(weights.values())]
    found = []
    for task, row in task_rows(run).items():
        if task in trained and not all_tasks:
            continue
        own = {"run": run.name, "trained": trained, "task": task}
        found.append({**own, **row})
        history = run.evaluations[task]
        last = history[-1].metrics
        for metric in ("kl", "turnover"):
            first = _first(history, metric)
            if metric in first and metric in last:  # a resume may have changed the task's kind
                numbers = {"before": first[metric], "after": last[metric]}
                found.append({**own, **numbers, "metric": metric, "delta": last[metric] - first[metric]})
    return found


def _first(history: Sequence[Evaluation], metric: str) -> Mapping[str, float]:
    """Return the numbers of the first evaluation with ``metric`` that measured what the last one does.

    Without one, those of the last.
    """
    last = history[-1]
    alike = (e for e in history if is_comparable(measured(e, metric), measured(last, metric)))
    return next((e.metrics for e in alike if metric in e.metrics), last.metrics)


def _constraints(run: RunRecord) -> list[dict[str, Any]]:
    """Return one row per constraint with a limit: its last evaluation, and its rate at the first alike."""
    rows = []
    for task, history in run.evaluations.items():
        last = history[-1].metrics
        for key in last:
            if key.startswith("constraint/") and key.endswith("/limit"):
                prefix = key.removesuffix("limit")
                own = {k.removeprefix(prefix): v for k, v in last.items() if k.startswith(prefix)}
                rate = f"{prefix}violation_rate"
                first = _first(history, rate)
                before = math.nan if first is last else first.get(rate, math.nan)
                name = prefix.removeprefix("constraint/").removesuffix("/")
                rows.append({"task": task, "constraint": name, "before": before, **own})
    return rows
