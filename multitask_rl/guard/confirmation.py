"""Confirmation of an alarm: a one-sided paired test of the current weights against weights judged good."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

from multitask_rl.records import Direction
from multitask_rl.statistics.intervals import sign_test, student_tails, summarise

_MAX_Z = 8.0
"""Largest reported z: beyond it the tail probability is below double precision."""


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
