"""The difference of two evaluations per task: before and after in one run, or two runs.

Values are paired by prompt if both evaluations are of the same prompts. Without any real difference, 5 % of
tables hold a verdict better or worse, whatever the number of tasks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from multitask_rl.boundary.printable import counted
from multitask_rl.config.run import dotted
from multitask_rl.records import Direction
from multitask_rl.statistics.definitions import are_different, definition_of, is_comparable, measured
from multitask_rl.statistics.intervals import Difference, holm
from multitask_rl.statistics.seeds import compare_arms
from multitask_rl.tracking.reading import Evaluation, RunRecord

Key = TypeVar("Key", bound=Hashable)
IGNORED = ("output_dir", "tracking.", "num_threads", "checkpoint.resume", "tasks_file")
"""Configuration that has no effect on what a run computes; tasks are recorded whole, with their places."""
IGNORED_OF_TASKS = (".source", ".renamed_from", ".former_names")
"""Ends of such keys of tasks."""


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


def are_alike(*evaluations: Evaluation) -> bool:
    """Whether all have one primary metric, direction and, as far as known, definition."""
    if are_different(*(definition_of(e.definitions) for e in evaluations)):
        return False
    return len({(e.metric, e.direction) for e in evaluations}) <= 1


def measure_the_same(first: Evaluation, second: Evaluation) -> bool:
    """Whether evaluations of one run are alike and, as far as known, of one sampling and the same prompts."""
    return are_alike(first, second) and is_comparable(measured(first), measured(second))


def share_prompts(base: RunRecord, other: RunRecord, first: Evaluation, second: Evaluation) -> bool:
    """Whether two evaluations are of the same held-out prompts.

    Without recorded prompts: whether the number of values and the configuration of the data are the same.
    """
    if len(first.values) != len(second.values):
        return False
    if first.prompts or second.prompts:
        return first.prompts == second.prompts
    relevant = ("seed", "eval.", f"tasks.{first.task}.dataset", f"tasks.{first.task}.eval_dataset")
    different = config_difference(base.config, other.config)
    return not any(key == name or key.startswith(name) for key in different for name in relevant)


def difference_rows(pairs: Mapping[Key, Pair]) -> dict[Key, dict[str, Any]]:
    """Return a row per pair.

    Each interval is 95 % by itself; the p-values of the verdicts are corrected for all of them (Holm).
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
            "reason": "; ".join(filter(None, (_why_nothing_is_said(pair, difference), _left_out(pair)))),
        }
    return rows


def _why_nothing_is_said(pair: Pair, difference: Difference) -> str:
    """Return why there is no interval or no verdict; empty if there are both, or nothing to compare."""
    if pair.paired and len(pair.first) == len(pair.second) == 1:
        pairs = zip(pair.first[0].values, pair.second[0].values, strict=True)
        if all(a == b for a, b in pairs if math.isfinite(a - b)):
            return f"no difference: all {difference.n} pairs are equal" if difference.n else ""
    if difference.n and math.isnan(difference.p_value):
        return f"no verdict: {counted(difference.n, 'value')}, too few for p < 5 % whatever they are"
    if difference.n and math.isnan(difference.low):
        return f"no interval: the {'differences' if pair.paired else 'values'} do not vary"
    return ""


def _left_out(pair: Pair) -> str:
    """Return how many held-out prompts lack a value in a run that must have one; empty if none does."""
    runs = [*pair.first, *pair.second]
    if not pair.paired or not all(len(e.values) == len(runs[0].values) for e in runs):
        return ""
    rows = list(zip(*(e.values for e in runs), strict=True))
    number = sum(not all(map(math.isfinite, row)) for row in rows)
    where = "on both sides" if len(runs) == 2 else f"in each of the {len(runs)} runs"
    return f"{number} of {len(rows)} held-out prompts were not scored {where}" if number else ""


def config_difference(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return dotted key -> [base's, other's] where they differ; None = has no such key."""
    first, second = dict(dotted(base)), dict(dotted(other))
    return {
        key: [first.get(key), second.get(key)]
        for key in sorted({*first, *second})
        if first.get(key) != second.get(key)
        and not (key.startswith(IGNORED) or key.endswith(IGNORED_OF_TASKS))
    }
