"""Confirmation of an alarm: a one-sided paired test of the current weights against weights judged good."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance
from typing import Any

from multitask_rl.guard.base import Confirm
from multitask_rl.guard.settings import SafetyGuardConfig
from multitask_rl.guard.watched_metric import WatchedMetric
from multitask_rl.records import Direction, TaskEvaluation, rename_tasks
from multitask_rl.statistics.intervals import sign_test, student_tails, summarise

_OVERWHELMING = 2.0
"""Evidence above this multiple of the limit needs no agreement of the stored evaluations."""
_MAX_Z = 8.0
"""Largest reported z: beyond it the tail probability is below double precision."""


class Confirmation:
    """Paired tests of an alarmed metric; keeps the evaluation of the weights last judged good.

    A fresh evaluation uses new prompts or seeds for both weights. It is independent of the detector, so a
    false alarm must happen twice by chance. During an alarm fresh evaluations are collected, so that two or
    three of them find a fall that one is too small to show.
    """

    def __init__(self, config: SafetyGuardConfig) -> None:
        self._config = config
        self._good: dict[str, list[float]] = {}
        self._fresh: dict[str, list[list[float]]] = {}

    def remember_good(
        self, metrics: Sequence[WatchedMetric], evaluations: Mapping[str, TaskEvaluation]
    ) -> None:
        """Keep the values per prompt of weights judged good, of every watched metric."""
        self._good = {
            metric.key: list(found.values)
            for metric in metrics
            if metric.task in evaluations and (found := metric.find(evaluations[metric.task])) is not None
        }

    def forget_fresh(self) -> None:
        """Drop the collected fresh evaluations when an alarm is over."""
        self._fresh = {}

    def test(
        self,
        metric: WatchedMetric,
        evaluation: TaskEvaluation,
        statistics: Mapping[str, float],
        confirm: Confirm | None,
    ) -> tuple[bool, dict[str, float]]:
        """Return whether the fall is confirmed, and the numbers of the test.

        Without values per prompt to compare (no weights were judged good yet) the detector alone decides.
        """
        stored = metric.find(evaluation)
        if not self._config.confirm or stored is None:
            return True, {}
        fresh = confirm(metric.task) if confirm is not None else None
        pair = [found for side in fresh or () if (found := metric.find(side)) is not None]
        if len(pair) == 2:
            samples = self._fresh.setdefault(metric.key, [[], []])
            for sample, found in zip(samples, pair, strict=True):
                sample.extend(found.values)
            limit = self._config.confirm_z
        elif self._good.get(metric.key):
            samples, limit = [list(stored.values), self._good[metric.key]], self._config.stored_z
        else:
            return True, {}
        test = compare_paired(*samples, direction=stored.direction)
        numbers = {"z": test.z, "z_limit": limit, "paired_drop": test.drop}
        overwhelming = fresh is None and statistics["cusum"] > _OVERWHELMING * statistics["cusum_limit"]
        return test.z > limit or overwhelming, numbers | {"paired_prompts": float(test.num_prompts)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {"good": self._good, "fresh": self._fresh}

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None) -> None:
        """Restore ``state_dict``."""
        self._good = rename_tasks(state["good"], renamed)
        self._fresh = rename_tasks(state["fresh"], renamed)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedTest:
    """Result of one comparison; large ``drop`` and ``z`` = the current weights are worse."""

    drop: float
    """Mean of good minus current weights, oriented."""
    z: float
    """Standard normal quantile of the one-sided test of "no drop"."""
    num_prompts: int
    """Prompts with a value on both sides."""


def compare_paired(
    current: Sequence[float], good: Sequence[float], *, direction: Direction = Direction.higher
) -> PairedTest:
    """Test whether ``current`` is worse than ``good``, prompt by prompt.

    Both sides have the same prompts and sampling seeds, so most of the noise cancels in the difference. For
    values of 0 and 1 this is McNemar's exact test (``sign_test``), else Student's of the mean difference.
    Prompts with NaN on at least one side are left out. Sequences are compared as independent samples if
    their lengths differ or the pairs cover less than half of the smaller side.

    Source: McNemar, "Note on the sampling error of the difference between correlated proportions",
    Psychometrika 12, 1947.

    >>> compare_paired([0, 0, 0, 0, 1], [1, 1, 1, 1, 1]).z > 1.5
    True
    """
    now, then = ([v for v in values if math.isfinite(v)] for values in (current, good))
    pairs = [(c, g) for c, g in zip(current, good, strict=False) if math.isfinite(c) and math.isfinite(g)]
    is_paired = len(current) == len(good) and 2 * len(pairs) >= min(len(now), len(then))
    number = len(pairs) if is_paired else min(len(now), len(then))
    drop = z = 0.0
    if number > 1 and not is_paired:
        first, second = summarise(now), summarise(then)
        drop = direction.sign * (second.mean - first.mean)
        z = _student_z(drop, math.hypot(first.error, second.error), number - 1)
    elif number > 1:
        drops = [direction.sign * (g - c) for c, g in pairs]
        drop, worse, better = fmean(drops), drops.count(1.0), drops.count(-1.0)
        if any(value not in (0.0, 1.0) for pair in pairs for value in pair):
            z = _student_z(drop, math.sqrt(variance(drops) / number), number - 1)
        elif worse != better:
            z = math.copysign(_z_of_tail(sign_test(worse, better)), worse - better)
    return PairedTest(drop=drop, z=z, num_prompts=number)


def _student_z(mean: float, error: float, degrees: int) -> float:
    """Return the normal quantile with the tail probability of Student's t = ``mean / error``."""
    if not error > 0.0:
        return math.copysign(_MAX_Z, mean) if mean else 0.0
    return math.copysign(_z_of_tail(student_tails(mean / error, degrees) / 2), mean)


def _z_of_tail(tail: float) -> float:
    return _MAX_Z if tail < 1e-15 else NormalDist().inv_cdf(1.0 - tail)
