"""``multitask-rl compare RUN RUN...`` and ``multitask-rl report RUN``: results of runs, with intervals.

A run is its output directory, or ``mlflow:<run id>``. The first run of ``compare`` is the base. Values are
paired by prompt if both runs evaluated the same prompts of a task. Without any real difference, 5 % of tables
hold a verdict better or worse, whatever the number of tasks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from multitask_rl.boundary.printable import one_line, printable
from multitask_rl.cli import aligned
from multitask_rl.config.run import dotted
from multitask_rl.errors import ConfigError, path_errors
from multitask_rl.records import Direction
from multitask_rl.report.page import render_page
from multitask_rl.statistics.intervals import Difference, compare_means, holm
from multitask_rl.tracking.jsonl import dump_line
from multitask_rl.tracking.reading import Evaluation, RunRecord, read_run

_IGNORED = ("output_dir", "tracking.", "num_threads", "checkpoint.resume", "tasks_file")
"""Configuration that has no effect on what a run computes; tasks are recorded whole, with their places."""
_HISTORY_ROWS = 12


def main_compare(argv: Sequence[str]) -> int:
    """Run ``compare``; 0 whatever the verdicts are.

    Raises:
        ConfigError: a run cannot be read or the runs share no task.
    """
    parser = argparse.ArgumentParser(
        prog="multitask-rl compare", description="Compare runs: difference, interval and verdict per task."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output directory or mlflow:<run id>")
    parser.add_argument("--step", type=int, help="evaluation to compare (default: each run's last)")
    _add_common(parser)
    options = parser.parse_args(argv)
    if len(options.runs) < 2:
        parser.error("give at least two runs")
    with contextlib.ExitStack() as stack:
        base, *others = (stack.enter_context(_open_run(name, options.tracking_uri)) for name in options.runs)
    results = [compare_runs(base, other, options.step) for other in others]
    _write(results, options.json, lambda: "\n\n".join(map(render_comparison, results)))
    return 0


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
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page that works offline")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")
    _add_common(parser)
    options = parser.parse_args(argv)
    if options.open and options.html is None:
        parser.error("--open shows the page that --html FILE writes")
    if options.html and (len(options.run) > 1 or options.run[0].startswith("mlflow:")):
        parser.error("--html takes one run, by its output directory")
    if len(options.run) > 1:
        with contextlib.ExitStack() as stack:
            runs = [stack.enter_context(_open_run(name, options.tracking_uri)) for name in options.run]
        changes = [change for run in runs for change in _changes(run, all_tasks=True)]
        _write({"runs": options.run, "changes": changes}, options.json, lambda: _change_table(changes))
        return 0
    with _open_run(options.run[0], options.tracking_uri) as run:
        result = summarise_run(run)
        if options.html:
            page = render_page(run, result, Path(options.run[0]))
            with path_errors("the page", options.html, "a file that can be written"):
                options.html.write_text(page, encoding="utf-8")
            if options.open:
                webbrowser.open(options.html.resolve().as_uri())
    _write(result, options.json, lambda: _render_report(result))
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


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tracking-uri", default="", help="MLflow server, for runs given as mlflow:<run id>")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _write(result: object, as_json: bool, render: Callable[[], str]) -> None:
    sys.stdout.write(dump_line({"result": result}) if as_json else printable(render()) + "\n")


@contextlib.contextmanager
def _open_run(name: str, tracking_uri: str) -> Iterator[RunRecord]:
    scheme, _, run_id = name.partition(":")
    if scheme != "mlflow":
        yield read_run(Path(name))
        return
    from multitask_rl.tracking.mlflow import fetch_run

    with tempfile.TemporaryDirectory() as directory:
        fetch_run(tracking_uri, run_id, Path(directory))
        yield read_run(Path(directory), name)


def compare_runs(base: RunRecord, other: RunRecord, step: int | None = None) -> dict[str, Any]:
    """Return a row per task that both have, of the evaluation at ``step`` (None = the last).

    Raises:
        ConfigError: the runs share no task, have no such evaluation, or judge a task by other metrics.
    """
    tasks = [task for task in base.evaluations if task in other.evaluations]
    if not tasks:
        raise ConfigError(
            f"{base.name} and {other.name} share no task: {', '.join(base.evaluations)} against "
            f"{', '.join(other.evaluations)}"
        )
    pairs = {}
    for task in tasks:
        chosen = []
        for run in (base, other):
            found = [e for e in run.evaluations[task] if step in (None, e.step)]
            if not found:
                steps = ", ".join(str(evaluation.step) for evaluation in run.evaluations[task])
                raise ConfigError(f"{run.name} has no evaluation of {task!r} at step {step}; it has: {steps}")
            chosen.append(found[-1] if step is None else found[0])
        first, second = chosen
        if first.metric != second.metric:
            raise ConfigError(
                f"task {task!r} is judged by {first.metric!r} in {base.name} and by {second.metric!r} in "
                f"{other.name}; compare runs with the same primary_metric"
            )
        pairs[task] = first, second, _share_prompts(base, other, first, second)
    return {
        "base": base.name,
        "other": other.name,
        "tasks": _rows(pairs),
        "only_in_one": sorted(set(base.evaluations) ^ set(other.evaluations)),
        "config": _config_difference(base.config, other.config),
    }


def _share_prompts(base: RunRecord, other: RunRecord, first: Evaluation, second: Evaluation) -> bool:
    """Compare the recorded prompts or, without them, the number of values and the configuration."""
    if len(first.values) != len(second.values):
        return False
    if first.prompts or second.prompts:
        return first.prompts == second.prompts
    relevant = ("seed", "eval.", f"tasks.{first.task}.dataset", f"tasks.{first.task}.eval_dataset")
    different = _config_difference(base.config, other.config)
    return not any(key == name or key.startswith(name) for key in different for name in relevant)


def _report_rows(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Return a row per task: its last evaluation against the first one with the same metric."""
    pairs, more = {}, dict[str, dict[str, Any]]()
    for task, history in run.evaluations.items():
        last = history[-1]
        kind = (last.metric, last.direction)
        alike = [e for e in history if (e.metric, e.direction) == kind]
        more[task] = {"left_out": [e.step for e in history if (e.metric, e.direction) != kind]}
        if len(alike) > 1:
            pairs[task] = (alike[0], last, _share_prompts(run, run, alike[0], last))
        else:
            pairs[task] = (replace(last, values=[]), last, False)
            more[task]["steps"] = [None, last.step]
    return {task: {**row, **more[task]} for task, row in _rows(pairs).items()}


def _rows(pairs: Mapping[str, tuple[Evaluation, Evaluation, bool]]) -> dict[str, dict[str, Any]]:
    """Return a row per task from (before, after, whether the prompts are the same).

    Each interval stands alone; the verdicts are read together, so their p-values are corrected (Holm).
    """
    found = {
        task: compare_means(first.values, second.values, paired=paired)
        for task, (first, second, paired) in pairs.items()
    }
    corrected = holm([difference.p_value for difference in found.values()])
    rows = {}
    for (task, difference), p_value in zip(found.items(), corrected, strict=True):
        first, second, paired = pairs[task]
        rows[task] = {
            "metric": first.metric,
            "steps": [first.step, second.step],
            "before": difference.base,
            "after": difference.other,
            "delta": difference.delta,
            "low": difference.low,
            "high": difference.high,
            "p_value": p_value,
            "n": difference.n,
            "paired": paired,
            "verdict": difference.verdict(first.direction is not Direction.lower, p_value),
            "reason": _why_nothing_is_said(first.values, second.values, difference),
        }
    return rows


def _why_nothing_is_said(before: Sequence[float], after: Sequence[float], difference: Difference) -> str:
    """Return why there is no interval or no verdict; empty if there are both, or nothing to compare."""
    pairs = zip(before, after, strict=True) if difference.paired else ()
    if difference.paired and all(a == b for a, b in pairs if math.isfinite(a) and math.isfinite(b)):
        return f"no difference: all {difference.n} pairs are equal" if difference.n else ""
    if difference.n and math.isnan(difference.p_value):
        return f"no verdict: {difference.n} values are too few for p < 5 %, whatever they are"
    if difference.n and math.isnan(difference.low):
        return "no interval: the values do not vary"
    return ""


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
        numbers = [_number(row[key]) for key in ("before", "after", "delta")]
        ends = f"[{_number(row['low'])}, {_number(row['high'])}]" if "low" in row else ""
        trained = ", ".join(row["trained"]) or "-"
        table.append([trained, row["task"], row["metric"], *numbers, ends, row.get("verdict", "")])
    return _table(table)


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


def _config_difference(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return dotted key -> [base's, other's] where they differ; None = has no such key."""
    first, second = dict(dotted(base)), dict(dotted(other))
    return {
        key: [first.get(key), second.get(key)]
        for key in sorted({*first, *second})
        if first.get(key) != second.get(key) and not (key.startswith(_IGNORED) or key.endswith(".source"))
    }


def _number(value: float) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table whose first row is the head."""
    head, *lines = aligned(rows)
    return "\n".join([head, "-" * len(head), *lines])


def _task_table(rows: Mapping[str, Mapping[str, Any]], heads: tuple[str, str]) -> str:
    table = [["task", "metric", *heads, "difference", "95% interval", "n", "paired", "verdict"]]
    for task, row in rows.items():
        interval = f"[{_number(row['low'])}, {_number(row['high'])}]"
        numbers = [_number(row[key]) for key in ("before", "after", "delta")]
        paired = "yes" if row["paired"] else "no"
        table.append([task, row["metric"], *numbers, interval, str(row["n"]), paired, row["verdict"]])
    text = _table(table)
    text += "".join(f"\n{task}: {row['reason']}" for task, row in rows.items() if row["reason"])
    if len(rows) > 1:
        text += f"\nverdicts: at 5 % over all {len(rows)} tasks together (Holm); every interval stands alone"
    return text


def render_comparison(result: Mapping[str, Any]) -> str:
    """Return the table of ``compare_runs``."""
    counts = dict.fromkeys(("better", "worse", "same", "unknown"), 0)
    for row in result["tasks"].values():
        counts[row["verdict"]] += 1
    parts = [
        f"base:  {result['base']}\nother: {result['other']}",
        _task_table(result["tasks"], ("base", "other")),
        "other against base: " + ", ".join(f"{number} {word}" for word, number in counts.items() if number),
    ]
    if result["only_in_one"]:
        parts.append("tasks in only one of them: " + ", ".join(result["only_in_one"]))
    if result["config"]:
        rows = [
            [key, *(json.dumps(value, default=str) for value in pair)]
            for key, pair in result["config"].items()
        ]
        parts.append(_table([["configuration", "base", "other"], *rows]))
    elif result["config"] is not None:
        parts.append("the configurations do not differ")
    return "\n\n".join(parts)


def _render_report(result: Mapping[str, Any]) -> str:
    parts = [f"run: {result['run']}", _task_table(result["tasks"], ("before", "after"))]
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
            numbers = [_number(row.get(key, math.nan)) for key in keys]
            verdict = {None: "-", 0.0: "no"}.get(row.get("satisfied"), "yes")
            count = f"{row['n']:.0f}" if "n" in row else "-"
            table.append([f"{row['task']}/{row['constraint']}", *numbers, count, verdict])
        parts.append(_table(table))
    weights = result["weights"]
    if weights:
        steps = sorted({int(step) for own in weights.values() for step in own})
        stride = math.ceil(len(steps) / _HISTORY_ROWS)
        shown = sorted({*steps[::stride], steps[-1]})
        rows = [
            [str(step), *(_number(own.get(str(step), math.nan)) for own in weights.values())]
            for step in shown
        ]
        parts.append(_table([["weights at step", *weights], *rows]))
    if result["stages"]:
        rows = [
            [name, *(f"{own[key]:.1%}" for key in ("busy", "waited"))]
            for name, own in result["stages"].items()
        ]
        parts.append(_table([["of the steps' time", "busy", "update waited for it"], *rows]))
    events = [
        f"step {event['step']}  {event['source']} {event['kind']}"
        + (f" [{event['task']}]" if event.get("task") else "")
        + f": {one_line(event['reason'])}"
        for event in result["events"]
    ]
    parts.append("\n".join(["events:", *events]) if events else "no events")
    return "\n\n".join(parts)
