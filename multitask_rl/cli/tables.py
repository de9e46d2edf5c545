"""What ``compare`` and ``report`` share: runs by name, differences as rows, tables of text.

A run is its output directory, or ``mlflow:<run id>``. Values are paired by prompt if both evaluations are of
the same prompts. Without any real difference, 5 % of tables hold a verdict better or worse, whatever the
number of tasks.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from multitask_rl.boundary.printable import printable
from multitask_rl.cli import aligned
from multitask_rl.config.run import dotted
from multitask_rl.errors import path_errors
from multitask_rl.records import Direction
from multitask_rl.statistics.intervals import Difference, holm
from multitask_rl.statistics.seeds import compare_arms
from multitask_rl.tracking.jsonl import dump_line
from multitask_rl.tracking.reading import Evaluation, RunRecord, read_run

Key = TypeVar("Key", bound=Hashable)
IGNORED = ("output_dir", "tracking.", "num_threads", "checkpoint.resume", "tasks_file")
"""Configuration that has no effect on what a run computes; tasks are recorded whole, with their places."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Evaluations of one task on two sides, one per run."""

    first: Sequence[Evaluation]
    second: Sequence[Evaluation]
    paired: bool
    """Both sides have the same held-out prompts."""
    paired_seeds: bool = False
    """Run ``i`` of both sides has the same seed."""
    crossed: bool = True
    """All runs of a side have the same held-out prompts."""

    def difference(self) -> Difference:
        """Return the difference of the sides, with its interval."""
        first, second = ([e.values for e in side] for side in (self.first, self.second))
        return compare_arms(
            first, second, paired=self.paired, paired_seeds=self.paired_seeds, crossed=self.crossed
        )


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that read runs."""
    parser.add_argument("--tracking-uri", default="", help="MLflow server, for runs given as mlflow:<run id>")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def add_page(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that write a page."""
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page that works offline")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")


def write_page(options: argparse.Namespace, page: str) -> None:
    """Write the page to ``--html`` and show it if ``--open`` says so; ConfigError if it cannot be written."""
    with path_errors("the page", options.html, "a file that can be written"):
        options.html.write_text(page, encoding="utf-8")
    if options.open:
        webbrowser.open(options.html.resolve().as_uri())


def write(result: object, as_json: bool, render: Callable[[], str]) -> None:
    """Print a result as JSON, or as the text that ``render`` returns."""
    sys.stdout.write(dump_line({"result": result}) if as_json else printable(render()) + "\n")


@contextlib.contextmanager
def open_run(name: str, tracking_uri: str, *, whole: bool = True) -> Iterator[RunRecord]:
    """Read a run: an output directory, or ``mlflow:<run id>``; ConfigError if it cannot be read."""
    scheme, _, run_id = name.partition(":")
    if scheme != "mlflow":
        yield read_run(Path(name), whole=whole)
        return
    from multitask_rl.tracking.mlflow import fetch_run

    with tempfile.TemporaryDirectory() as directory:
        fetch_run(tracking_uri, run_id, Path(directory))
        yield read_run(Path(directory), name, whole=whole)


def share_prompts(base: RunRecord, other: RunRecord, first: Evaluation, second: Evaluation) -> bool:
    """Compare the recorded prompts or, without them, the number of values and the configuration."""
    if len(first.values) != len(second.values):
        return False
    if first.prompts or second.prompts:
        return first.prompts == second.prompts
    relevant = ("seed", "eval.", f"tasks.{first.task}.dataset", f"tasks.{first.task}.eval_dataset")
    different = config_difference(base.config, other.config)
    return not any(key == name or key.startswith(name) for key in different for name in relevant)


def difference_rows(pairs: Mapping[Key, Pair]) -> dict[Key, dict[str, Any]]:
    """Return a row per pair.

    Each interval stands alone; the verdicts are read together, so their p-values are corrected (Holm).
    """
    found = {key: pair.difference() for key, pair in pairs.items()}
    corrected = holm([difference.p_value for difference in found.values()])
    rows = {}
    for (key, difference), p_value in zip(found.items(), corrected, strict=True):
        pair = pairs[key]
        first = pair.first[0]
        rows[key] = {
            "metric": first.metric,
            "steps": [max(e.step for e in side) for side in (pair.first, pair.second)],
            "before": difference.base,
            "after": difference.other,
            "delta": difference.delta,
            "low": difference.low,
            "high": difference.high,
            "p_value": p_value,
            "n": difference.n,
            "paired": pair.paired,
            "seeds": [len(pair.first), len(pair.second)],
            "paired_seeds": pair.paired_seeds,
            "verdict": difference.verdict(first.direction is not Direction.lower, p_value),
            "reason": _why_nothing_is_said(pair, difference),
        }
    return rows


def _why_nothing_is_said(pair: Pair, difference: Difference) -> str:
    """Return why there is no interval or no verdict; empty if there are both, or nothing to compare."""
    if pair.paired and len(pair.first) == len(pair.second) == 1:
        pairs = zip(pair.first[0].values, pair.second[0].values, strict=True)
        if all(a == b for a, b in pairs if math.isfinite(a - b)):
            return f"no difference: all {difference.n} pairs are equal" if difference.n else ""
    if difference.n and math.isnan(difference.p_value):
        return f"no verdict: {difference.n} values are too few for p < 5 %, whatever they are"
    if difference.n and math.isnan(difference.low):
        return "no interval: the values do not vary"
    return ""


def config_difference(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return dotted key -> [base's, other's] where they differ; None = has no such key."""
    first, second = dict(dotted(base)), dict(dotted(other))
    return {
        key: [first.get(key), second.get(key)]
        for key in sorted({*first, *second})
        if first.get(key) != second.get(key) and not (key.startswith(IGNORED) or key.endswith(".source"))
    }


def number(value: float | None) -> str:
    """Return a number with four digits, ``-`` for none."""
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"


def ruled(rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table whose first row is the head."""
    head, *lines = aligned(rows)
    return "\n".join([head, "-" * len(head), *lines])


def task_table(rows: Mapping[str, Mapping[str, Any]], heads: tuple[str, str], num_verdicts: int = 0) -> str:
    """Return the rows of ``difference_rows`` as a table, with what is to be said of them below it.

    ``num_verdicts`` are read together, if more than those of this table.
    """
    has_seeds = any(row["seeds"] != [1, 1] for row in rows.values())
    more = ["seeds"] if has_seeds else []
    table = [["task", "metric", *heads, "difference", "95% interval", *more, "n", "paired", "verdict"]]
    for task, row in rows.items():
        interval = f"[{number(row['low'])}, {number(row['high'])}]"
        numbers = [number(row[key]) for key in ("before", "after", "delta")]
        paired = "yes" if row["paired"] else "no"
        if has_seeds:
            more = [" + ".join(map(str, row["seeds"]))]
            names = {"prompts": row["paired"], "seeds": row["paired_seeds"]}
            paired = ", ".join(name for name, is_so in names.items() if is_so) or "no"
        counts = [*more, str(row["n"]), paired, row["verdict"]]
        table.append([task, row["metric"], *numbers, interval, *counts])
    text = ruled(table)
    text += "".join(f"\n{task}: {row['reason']}" for task, row in rows.items() if row["reason"])
    if num_verdicts > len(rows):
        text += f"\nverdicts: at 5 % over all {num_verdicts} of all tables together (Holm)"
    elif len(rows) > 1:
        text += f"\nverdicts: at 5 % over all {len(rows)} tasks together (Holm); every interval stands alone"
    return text
