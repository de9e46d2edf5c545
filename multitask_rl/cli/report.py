"""``multitask-rl report RUN``: results of a run, first evaluation against last, with intervals."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from multitask_rl.boundary.printable import one_line
from multitask_rl.cli.tables import (
    Pair,
    add_common,
    add_page,
    difference_rows,
    number,
    open_run,
    ruled,
    share_prompts,
    task_table,
    write,
    write_page,
)
from multitask_rl.report.page import render_page
from multitask_rl.tracking.reading import RunRecord

_HISTORY_ROWS = 12


def main_report(argv: Sequence[str]) -> int:
    """Run ``report``: before and after per task, the weights' history, the events.

    Of several runs: what training on the tasks of each changed in all tasks.

    Raises:
        ConfigError: a run cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="multitask-rl report",
        description="Summarise one run: tasks, constraints, events, times. Of several: what training on A "
        "changed in B.",
    )
    parser.add_argument("run", metavar="RUN", nargs="+", help="output directory or mlflow:<run id>")
    add_page(parser)
    add_common(parser)
    options = parser.parse_args(argv)
    if options.open and options.html is None:
        parser.error("--open shows the page that --html FILE writes")
    if options.html and (len(options.run) > 1 or options.run[0].startswith("mlflow:")):
        parser.error("--html takes one run, by its output directory")
    if len(options.run) > 1:
        with contextlib.ExitStack() as stack:
            runs = [stack.enter_context(open_run(name, options.tracking_uri)) for name in options.run]
        changes = [change for run in runs for change in _changes(run, all_tasks=True)]
        write({"runs": options.run, "changes": changes}, options.json, lambda: _change_table(changes))
        return 0
    with open_run(options.run[0], options.tracking_uri) as run:
        result = summarise_run(run)
        if options.html:
            write_page(options, render_page(run, result, Path(options.run[0])))
    write(result, options.json, lambda: _render_report(result))
    return 0


def summarise_run(run: RunRecord) -> dict[str, Any]:
    """Return what ``report`` says of one run."""
    return {
        "run": run.name,
        "tasks": _report_rows(run),
        "changes": _changes(run),
        "constraints": _constraints(run),
        "weights": {task: {str(step): w for step, w in own.items()} for task, own in run.weights.items()},
        "stages": run.stages,
        "events": run.events,
    }


def _report_rows(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Return a row per task: its last evaluation against the first one with the same metric."""
    pairs, more = {}, dict[str, dict[str, Any]]()
    for task, history in run.evaluations.items():
        last = history[-1]
        kind = (last.metric, last.direction)
        alike = [e for e in history if (e.metric, e.direction) == kind]
        more[task] = {"left_out": [e.step for e in history if (e.metric, e.direction) != kind]}
        if len(alike) > 1:
            pairs[task] = Pair([alike[0]], [last], share_prompts(run, run, alike[0], last))
        else:
            pairs[task] = Pair([replace(last, values=[])], [last], paired=False)
            more[task]["steps"] = [None, last.step]
    return {task: {**row, **more[task]} for task, row in difference_rows(pairs).items()}


def _changes(run: RunRecord, *, all_tasks: bool = False) -> list[dict[str, Any]]:
    """Return what training changed in tasks that it did not train on: primary metric, ``kl``, ``turnover``.

    With ``all_tasks`` also in those that it trained on.
    """
    trained = [task for task, weights in run.weights.items() if any(weights.values())]
    found = []
    for task, row in _report_rows(run).items():
        if task in trained and not all_tasks:
            continue
        own = {"run": run.name, "trained": trained, "task": task}
        found.append({**own, **row})
        first, last = run.evaluations[task][0].metrics, run.evaluations[task][-1].metrics
        for metric in ("kl", "turnover"):
            if metric in first:
                numbers = {"before": first[metric], "after": last[metric]}
                found.append({**own, **numbers, "metric": metric, "delta": last[metric] - first[metric]})
    return found


def _change_table(changes: Sequence[Mapping[str, Any]]) -> str:
    table = [["training on", "changed", "metric", "before", "after", "difference", "95% interval", "verdict"]]
    for row in changes:
        numbers = [number(row[key]) for key in ("before", "after", "delta")]
        ends = f"[{number(row['low'])}, {number(row['high'])}]" if "low" in row else ""
        trained = ", ".join(row["trained"]) or "-"
        table.append([trained, row["task"], row["metric"], *numbers, ends, row.get("verdict", "")])
    return ruled(table)


def _constraints(run: RunRecord) -> list[dict[str, Any]]:
    """Return one row per constraint with a limit: its last evaluation, and its rate at the first."""
    rows = []
    for task, history in run.evaluations.items():
        first, last = history[0].metrics if len(history) > 1 else {}, history[-1].metrics
        for key in last:
            if key.startswith("constraint/") and key.endswith("/limit"):
                prefix = key.removesuffix("limit")
                own = {k.removeprefix(prefix): v for k, v in last.items() if k.startswith(prefix)}
                before = first.get(f"{prefix}violation_rate", math.nan)
                name = prefix.removeprefix("constraint/").removesuffix("/")
                rows.append({"task": task, "constraint": name, "before": before, **own})
    return rows


def _render_report(result: Mapping[str, Any]) -> str:
    parts = [f"run: {result['run']}", task_table(result["tasks"], ("before", "after"))]
    parts += [
        f"{task}: not compared with the evaluations at steps {', '.join(map(str, row['left_out']))}, "
        f"which were not judged by {row['metric']!r} in the same direction"
        for task, row in result["tasks"].items()
        if row["left_out"]
    ]
    if result["changes"]:
        parts.append(_change_table(result["changes"]))
    if result["constraints"]:
        table = [["constraint", "violations before", "after", "95% upper bound", "limit", "n", "satisfied"]]
        for row in result["constraints"]:
            keys = ("before", "violation_rate", "upper_bound", "limit")
            numbers = [number(row.get(key, math.nan)) for key in keys]
            verdict = {None: "-", 0.0: "no"}.get(row.get("satisfied"), "yes")
            count = f"{row['n']:.0f}" if "n" in row else "-"
            table.append([f"{row['task']}/{row['constraint']}", *numbers, count, verdict])
        parts.append(ruled(table))
    weights = result["weights"]
    if weights:
        steps = sorted({int(step) for own in weights.values() for step in own})
        stride = math.ceil(len(steps) / _HISTORY_ROWS)
        shown = sorted({*steps[::stride], steps[-1]})
        rows = [
            [str(step), *(number(own.get(str(step), math.nan)) for own in weights.values())] for step in shown
        ]
        parts.append(ruled([["weights at step", *weights], *rows]))
    if result["stages"]:
        rows = [
            [name, *(f"{own[key]:.1%}" for key in ("busy", "waited"))]
            for name, own in result["stages"].items()
        ]
        parts.append(ruled([["of the steps' time", "busy", "update waited for it"], *rows]))
    events = [
        f"step {event['step']}  {event['source']} {event['kind']}"
        + (f" [{event['task']}]" if event.get("task") else "")
        + f": {one_line(event['reason'])}"
        for event in result["events"]
    ]
    parts.append("\n".join(["events:", *events]) if events else "no events")
    return "\n\n".join(parts)
