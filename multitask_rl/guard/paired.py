"""One-sided paired test: is the current policy worse than the reference on the same prompts?

All evaluations use the same prompts and sampling seeds, so most of the noise cancels in the difference. A
paired test therefore finds drops that a comparison of independent means misses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

from multitask_rl.records import Direction
from multitask_rl.statistics.intervals import sign_test, student_tails, summarise

__all__ = ["PairedTest", "compare_paired"]

_MAX_Z = 8.0
"""Largest reported z: beyond it the tail probability is below double precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedTest:
    """Result of one comparison."""

    drop: float
    """Mean of reference minus current, oriented: > 0 = the current policy is worse."""
    z: float
    """Standard normal quantile of the one-sided test of "no drop"; large = worse than the reference."""
    num_prompts: int
    """Prompts with a value on both sides."""


def compare_paired(
    current: Sequence[float], reference: Sequence[float], *, direction: Direction = Direction.higher
) -> PairedTest:
    """Test whether ``current`` is worse than ``reference``, prompt by prompt.

    For values of 0 and 1 this is McNemar's exact test: given ``b + c`` prompts that changed, the ``b`` that
    got worse are Binomial(b + c, 1/2) without a drop. Otherwise it is Student's test of the mean difference.
    Prompts with NaN on at least one side are left out. Sequences are compared as independent samples if
    their lengths differ or the pairs cover less than half of the smaller side.

    Source: McNemar, "Note on the sampling error of the difference between correlated proportions",
    Psychometrika 12, 1947.

    >>> compare_paired([0, 0, 0, 0, 1], [1, 1, 1, 1, 1]).z > 1.5
    True
    """
    sign = direction.sign
    now, then = ([v for v in values if math.isfinite(v)] for values in (current, reference))
    pairs = [
        (c, r) for c, r in zip(current, reference, strict=False) if math.isfinite(c) and math.isfinite(r)
    ]
    if len(current) != len(reference) or 2 * len(pairs) < min(len(now), len(then)):
        return _compare_independent(now, then, sign)
    if len(pairs) < 2:
        return PairedTest(drop=0.0, z=0.0, num_prompts=len(pairs))
    drops = [sign * (r - c) for c, r in pairs]
    mean = fmean(drops)
    if all(value in (0.0, 1.0) for pair in pairs for value in pair):
        z = _mcnemar_z(worse=drops.count(1.0), better=drops.count(-1.0))
    else:
        z = _student_z(mean, math.sqrt(variance(drops) / len(drops)), len(drops) - 1)
    return PairedTest(drop=mean, z=z, num_prompts=len(pairs))


def _compare_independent(now: Sequence[float], then: Sequence[float], sign: int) -> PairedTest:
    number = min(len(now), len(then))
    if number < 2:
        return PairedTest(drop=0.0, z=0.0, num_prompts=number)
    first, second = summarise(now), summarise(then)
    drop = sign * (second.mean - first.mean)
    z = _student_z(drop, math.hypot(first.error, second.error), number - 1)
    return PairedTest(drop=drop, z=z, num_prompts=number)


def _mcnemar_z(*, worse: int, better: int) -> float:
    """Return the normal quantile of P(X < worse) for X ~ Binomial(worse + better, 1/2), mid-p."""
    if worse == better:
        return 0.0
    tail = sign_test(worse, better)
    z = _MAX_Z if tail < 1e-15 else NormalDist().inv_cdf(1.0 - tail)
    return z if worse > better else -z


def _student_z(mean: float, error: float, degrees: int) -> float:
    """Return the normal quantile with the tail probability of Student's t = ``mean / error``."""
    if not error > 0.0:
        return math.copysign(_MAX_Z, mean) if mean else 0.0
    tail = student_tails(mean / error, degrees) / 2
    z = _MAX_Z if tail < 1e-15 else NormalDist().inv_cdf(1.0 - tail)
    return math.copysign(min(z, _MAX_Z), mean)
