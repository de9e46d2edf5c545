"""``multitask-rl report RUN``: results of a run, first evaluation against last, with intervals."""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from multitask_rl.boundary.printable import one_line
from multitask_rl.cli.tables import (
    effects_table,
    number,
    open_run,
    parse_common,
    ruled,
    task_table,
    write,
    write_page,
)
from multitask_rl.report.page import render_page
from multitask_rl.report.summary import run_changes, summarise_run

_HISTORY_ROWS = 12
_MOST_COLUMNS = 24
"""Most columns of the table of shares and changes."""


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
    options = parse_common(parser, argv)
    if options.html and (len(options.run) > 1 or options.run[0].startswith("mlflow:")):
        parser.error("--html takes one run, by its output directory")
    if len(options.run) > 1:
        with contextlib.ExitStack() as stack:
            runs = [stack.enter_context(open_run(name, options.tracking_uri)) for name in options.run]
        changes = [change for run in runs for change in run_changes(run, all_tasks=True)]
        write({"runs": options.run, "changes": changes}, options.json, lambda: _change_table(changes))
        return 0
    with open_run(options.run[0], options.tracking_uri) as run:
        result = summarise_run(run)
        if options.html:
            write_page(options, render_page(run, result))
    write(result, options.json, lambda: _render_report(result))
    return 0


def _change_table(changes: Sequence[Mapping[str, Any]]) -> str:
    table = [["training on", "changed", "metric", "before", "after", "difference", "95% interval", "verdict"]]
    for row in changes:
        numbers = [number(row[key]) for key in ("before", "after", "delta")]
        ends = f"[{number(row['low'])}, {number(row['high'])}]" if "low" in row else ""
        trained = ", ".join(row["trained"]) or "-"
        table.append([trained, row["task"], row["metric"], *numbers, ends, row.get("verdict", "")])
    return ruled(table)


def _influence_tables(influence: Mapping[str, Any]) -> list[str]:
    """Return shares and changes between evaluations, and the effects of tasks on tasks."""
    intervals = influence["intervals"]
    trained = list(dict.fromkeys(task for own in intervals for task in own["shares"]))
    if len(trained) < 2:
        return []
    tasks = list(dict.fromkeys(task for own in intervals for task in own["changes"]))
    elsewhere = f"shares and changes of {len(tasks)} tasks between evaluations: --html FILE, --json"
    if len(trained) + len(tasks) > _MOST_COLUMNS:
        return [elsewhere]
    heads = [*(f"share {task}" for task in trained), *(f"change {task}" for task in tasks)]
    table = [["steps", *heads]]
    for own in intervals:
        shares = [number(own["shares"].get(task)) for task in trained]
        changes = [own["changes"].get(task) for task in tasks]
        cells = []
        for change in changes:
            half = math.nan if change is None else (change["high"] - change["low"]) / 2
            ends = f" ±{half:.3f}" if math.isfinite(half) else ""
            cells.append("-" if change is None else f"{change['delta']:+.3f}{ends}")
        table.append(["{} to {}".format(*own["steps"]), *shares, *cells])
    text = ruled(table)
    parts = [
        "between evaluations: share of the groups that gave a gradient (0: none of the task's did, whatever "
        "its weight), change of each held-out result:\n" + text
        if text.index("\n") <= shutil.get_terminal_size((10_000, 0)).columns
        else elsewhere
    ]
    effects: dict[str, dict[str, Any]] = {}
    for row in influence["effects"]:
        effects.setdefault(row["trained"], {})[row["task"]] = row
    if effects:
        parts.append(
            "training on a task (row) changed a held-out result (column) by, in a mean interval with prompts "
            "of that task alone:\n"
            + effects_table(effects, "effect")
            + "\n+ better, - worse at 5 % over the whole table (Holm); "
            "estimated from shares that change together: a wide interval says that they do"
        )
    if influence["reason"]:
        parts.append(f"what training on one task changed in others is not told: {influence['reason']}")
    return parts


def _render_report(result: Mapping[str, Any]) -> str:
    parts = [f"run: {result['run']}", task_table(result["tasks"], ("before", "after"))]
    if result["changes"]:
        parts.append(_change_table(result["changes"]))
    if result["turnover"]:
        table = [["prompts solved", "at first and now", "at first, not now", "now, not at first", "n"]]
        for task, row in result["turnover"].items():
            table.append([task, *(f"{row[key]:.1%}" for key in ("kept", "lost", "gained")), str(row["n"])])
        parts.append(ruled(table))
    parts += _influence_tables(result["influence"])
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
