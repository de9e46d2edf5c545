"""What ``compare`` and ``report`` share: options, runs by name, tables of text.

A run is its output directory, or ``mlflow:<run id>``.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from multitask_rl.boundary.printable import aligned, printable
from multitask_rl.errors import path_errors
from multitask_rl.tracking.jsonl import dump_line
from multitask_rl.tracking.reading import RunRecord, read_run


def parse_common(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Add the options of commands that read runs and write a page; return the parsed ``argv``."""
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page that works offline")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")
    parser.add_argument("--tracking-uri", default="", help="MLflow server, for runs given as mlflow:<run id>")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    if options.open and options.html is None:
        parser.error("--open needs --html FILE, the page that it opens")
    return options


def write_page(options: argparse.Namespace, page: str) -> None:
    """Write the page to ``--html`` and show it if ``--open`` says so; ConfigError if it cannot be written."""
    with path_errors("the page", options.html, "a file that can be written"):
        options.html.write_text(page, encoding="utf-8")
    address = options.html.resolve().as_uri()
    if not (options.open and webbrowser.open(address)):
        no_browser = "; no browser was found" if options.open else ""
        print(f"page: {address}{no_browser}", file=sys.stderr)


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


def number(value: float | None) -> str:
    """Return a number with four digits, ``-`` for none."""
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"


def measured(row: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return the numbers ``before``, ``after``, ``delta`` of a row of ``difference_rows``, and its interval.

    All have the same decimals: so many that half the width of the interval has two significant digits.
    Without an interval each number has four digits.
    """
    low, high, numbers = row["low"], row["high"], [row[key] for key in ("before", "after", "delta")]
    half = math.nan if low is None or high is None else (high - low) / 2
    if not (0 < half < math.inf) or any(value is None or math.isnan(value) for value in numbers):
        return [number(value) for value in numbers], f"[{number(low)}, {number(high)}]"
    decimals = max(0, 1 - math.floor(math.log10(half)))
    if decimals > 6:  # shorter as powers of ten
        return [number(value) for value in numbers], f"[{number(low)}, {number(high)}]"
    before, after, delta = (round(value, decimals) + 0.0 for value in numbers)
    shown = [f"{before:.{decimals}f}", f"{after:.{decimals}f}", f"{delta:+.{decimals}f}"]
    return shown, f"[{low:+.{decimals}f}, {high:+.{decimals}f}]"


def ruled(rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table whose first row is the head."""
    head, *lines = aligned(rows)
    return "\n".join([head, "-" * len(head), *lines])


def effects_table(effects: Mapping[str, Mapping[str, Mapping[str, Any]]], change: str) -> str:
    """Return a text table of ``effects``: one row per trained task, one column per measured task.

    ``effects[trained][measured]`` has the difference under the key ``change``, and ``low``, ``high`` and
    ``verdict``. Where it is missing, the table has a dash.
    """
    tasks = list(dict.fromkeys(task for own in effects.values() for task in own))
    marks = {"better": " +", "worse": " -"}
    table = [["training on", *tasks]]
    for name, own in effects.items():
        cells = []
        for row in (own.get(task) for task in tasks):
            ends = (
                "" if row is None or math.isnan(row["low"]) else f" [{row['low']:+.3f}, {row['high']:+.3f}]"
            )
            cells.append("-" if row is None else f"{row[change]:+.3f}{ends}{marks.get(row['verdict'], '')}")
        table.append([name, *cells])
    return ruled(table)


def task_table(rows: Mapping[str, Mapping[str, Any]], heads: tuple[str, str], num_verdicts: int = 0) -> str:
    """Return the rows of ``difference_rows`` as a table, with what is to be said of them below it.

    ``num_verdicts`` are read together, if more than those of this table.
    """
    has_seeds = any(row["seeds"] != [1, 1] for row in rows.values())
    more = ["seeds"] if has_seeds else []
    table = [["task", "metric", *heads, "difference", "95% interval", *more, "n", "paired", "verdict"]]
    for task, row in rows.items():
        numbers, interval = measured(row)
        paired = "yes" if row["paired"] else "no"
        if has_seeds:
            more = [" + ".join(map(str, row["seeds"]))]
            names = {"prompts": row["paired"], "seeds": row["paired_seeds"]}
            paired = ", ".join(name for name, is_so in names.items() if is_so) or "no"
        counts = [*more, str(row["n"]), paired, row["verdict"]]
        table.append([task, row["metric"], *numbers, interval, *counts])
    text = ruled(table)
    text += "".join(f"\n{task}: {row['reason']}" for task, row in rows.items() if row["reason"])
    scope = f"{num_verdicts} verdicts of all tables" if num_verdicts > len(rows) else f"{len(rows)} tasks"
    if max(num_verdicts, len(rows)) > 1:
        text += f"\nverdicts: at 5 % over all {scope} together (Holm); intervals: each 95 % by itself"
    return text
