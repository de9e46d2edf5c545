"""The evaluations of all tasks as one value, which terminals and notebooks show as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from types import MappingProxyType
from typing import Any

from multitask_rl.boundary.printable import printable
from multitask_rl.records import TaskEvaluation
from multitask_rl.statistics.definitions import OF_PROMPTS

_HEAD = ("task", "metric", "mean", "+/-", "n", "failed", "n/a")


class Evaluations(dict[str, TaskEvaluation]):
    """Task -> its evaluation; its text and its view in a notebook are a table with a line per task.

    Columns: the primary metric, its mean, half the width of the 95 % interval, and the number of responses. A
    response without a value is counted as ``failed``, or as ``n/a`` if the metric is not applicable to it.
    With several responses a prompt, lines of ``pass@k`` and ``maj@k`` follow, which count prompts.
    """

    changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Of a run that ended: task -> its last evaluation against the first, as ``report --json`` tells it."""

    def table(self) -> list[tuple[str, ...]]:
        """Return the cells, the heads first; lines of ``pass@k`` and ``maj@k`` name no task."""
        rows: list[tuple[str, ...]] = [_HEAD]
        for name, evaluation in self.items():
            primary, failed = evaluation.primary, evaluation.num_failed
            not_applicable = len(primary.values) * evaluation.num_samples - primary.n - failed
            numbers = (_number(primary.mean), _number(1.96 * primary.error), f"{primary.n}")
            rows.append((name, printable(evaluation.metric), *numbers, f"{failed}", f"{not_applicable}"))
            for metric, own in evaluation.metrics.items():
                if metric.startswith(OF_PROMPTS):
                    rows.append(
                        ("", metric, _number(own.mean), _number(1.96 * own.error), f"{own.n}", "", "")
                    )
        return rows

    def __repr__(self) -> str:
        rows = self.table()
        width = max(4, *(len(row[0]) for row in rows))
        lines = [
            f"{task:<{width}}  {metric:<20} {mean:>8} {half:>7} {n:>6} {failed:>6} {other:>6}".rstrip()
            for task, metric, mean, half, n, failed, other in rows
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        head, *rows = self.table()
        steps = sorted({evaluation.step for evaluation in self.values()})
        note = (
            f"Held out, step {', '.join(map(str, steps))}; +/- is half of the 95 % interval" if rows else ""
        )

        def line(cells: tuple[str, ...], kind: str) -> str:
            sides = ["left", "left"] + ["right"] * (len(cells) - 2)
            styled = zip(cells, sides, strict=True)
            return "".join(f'<{kind} style="text-align:{side}">{escape(c)}</{kind}>' for c, side in styled)

        body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
        top = f"<thead><tr>{line(head, 'th')}</tr></thead>"
        return f"<table><caption>{note}</caption>{top}<tbody>{body}</tbody></table>"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"
