"""Evaluations as a table for a person."""

from __future__ import annotations

import math
from collections.abc import Mapping

from multitask_rl.records import TaskEvaluation

__all__ = ["print_evaluations"]


def print_evaluations(evaluations: Mapping[str, TaskEvaluation]) -> None:
    """Print one line per task: metric, mean, half the width of the 95% interval, prompts, failures."""
    width = max([4, *map(len, evaluations)])
    print(f"{'task':<{width}}  {'metric':<20} {'mean':>8} {'+/-':>7} {'n':>6} {'failed':>6}")
    for name, evaluation in evaluations.items():
        valid = [v for v in evaluation.values if math.isfinite(v)]
        mean = sum(valid) / len(valid) if valid else math.nan
        variance = sum((v - mean) ** 2 for v in valid) / (len(valid) - 1) if len(valid) > 1 else math.nan
        half = 1.96 * math.sqrt(variance / len(valid)) if len(valid) > 1 else math.nan
        failed = len(evaluation.values) - len(valid)
        print(
            f"{name:<{width}}  {evaluation.metric:<20} {mean:>8.4f} {half:>7.4f} {len(valid):>6} {failed:>6}"
        )
