"""Evaluations as a table for a person."""

from __future__ import annotations

from collections.abc import Mapping

from multitask_rl.boundary.printable import printable
from multitask_rl.records import TaskEvaluation

__all__ = ["print_evaluations"]


def print_evaluations(evaluations: Mapping[str, TaskEvaluation]) -> None:
    """Print one line per task: metric, mean, half the width of the 95% interval, prompts.

    A prompt without a value has ``failed``, or the metric is not applicable to it (``n/a``).
    """
    width = max([4, *map(len, evaluations)])
    print(f"{'task':<{width}}  {'metric':<20} {'mean':>8} {'+/-':>7} {'n':>6} {'failed':>6} {'n/a':>6}")
    for name, evaluation in evaluations.items():
        primary = evaluation.primary
        half = 1.96 * primary.error
        failed = evaluation.num_failed
        not_applicable = len(primary.values) - primary.n - failed
        print(
            f"{name:<{width}}  {printable(evaluation.metric):<20} "
            f"{primary.mean:>8.4f} {half:>7.4f} {primary.n:>6} {failed:>6} {not_applicable:>6}"
        )
