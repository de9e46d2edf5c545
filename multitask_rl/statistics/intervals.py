"""Statistics of means and rates: standard errors, differences with intervals, tests, bounds."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

from scipy import special

from multitask_rl.records import Direction, Statistic

_LEVEL = 0.05
NOT_TOLD_APART = "not told apart"
"""Verdict of a difference that may be chance."""
_MAX_Z = 8.0
"""Largest reported z: beyond it the tail probability is below double precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The difference ``other - base`` of two means, with interval and p-value."""

    base: float
    other: float
    delta: float
    low: float
    """Lower end of the 95 % interval of ``delta``; NaN with fewer than two values, or without variance."""
    high: float
    p_value: float
    """Two-sided p-value of "no difference"; NaN if no outcome of so few values could be below 5 %."""
    n: int
    """Number of prompts (pairs, or the smaller side)."""
    paired: bool

    def verdict(self, higher_is_better: bool, p_value: float | None = None) -> str:
        """Return ``better``, ``worse``, ``not told apart`` (p >= 5 %) or ``unknown`` (too few values).

        ``p_value`` is corrected for the other verdicts (``holm``); None = this is the only one.
        """
        p_value = self.p_value if p_value is None else p_value
        if math.isnan(p_value):
            return "unknown"
        if p_value >= _LEVEL:
            return NOT_TOLD_APART
        return "better" if (self.delta > 0) == higher_is_better else "worse"


def summarise(
    values: Sequence[float],
    prompts: Sequence[Hashable] = (),
    *,
    direction: Direction = Direction.none,
    low: float = -math.inf,
    high: float = math.inf,
    keep: Sequence[Hashable] = (),
) -> Statistic:
    """Return the mean of the finite values, their number and the standard error of the mean.

    The error counts prompts, because values of one prompt are correlated (linearised error of a ratio,
    Cochran, "Sampling Techniques", 1977, 6.4). Values are a rate if all are at the two ends of their declared
    range, 0 and 1 if none is declared; a metric without an upper end, such as a loss, is never a rate. The
    error of a rate is at least Agresti and Coull's (two successes and two failures added), so it is above 0
    even if the event has not occurred.

    ``prompts`` holds the prompt of each value (empty = all differ); ``Statistic.values`` are the means of the
    prompts in ``keep``, in this order.
    """
    owners = prompts or range(len(values))
    by_prompt: dict[Hashable, list[float]] = {}
    for owner, value in zip(owners, values, strict=True):
        if math.isfinite(value):
            by_prompt.setdefault(owner, []).append(value)
    found = [value for own in by_prompt.values() for value in own]
    n, units = len(found), len(by_prompt)
    mean = mean_of(found)
    error = math.nan
    if units > 1:
        excess = math.fsum(math.fsum(value - mean for value in own) ** 2 for own in by_prompt.values())
        error = math.sqrt(excess * units / (units - 1)) / n
    bottom, top = (low, high) if math.isfinite(high - low) else (0.0, 1.0)
    has_ends = math.isfinite(low) == math.isfinite(high)
    if n and has_ends and top > bottom and all(value in (bottom, top) for value in found):
        rate = ((mean - bottom) / (top - bottom) * n + 2) / (n + 4)
        least = (top - bottom) * math.sqrt(rate * (1 - rate) / (n + 4))
        error = least if math.isnan(error) else max(error, least)
    means = {owner: mean_of(own) for owner, own in by_prompt.items()}
    kept = [means.get(owner, math.nan) for owner in keep]
    return Statistic(mean=mean, n=n, error=error, direction=direction, low=low, high=high, values=kept)


def mean_of(values: Sequence[float]) -> float:
    """Return the mean, which lies between the least and the largest value; NaN without values.

    ``fmean`` rounds: its mean of three times 0.1 is above 0.1, which a test would take for a difference.
    """
    return min(max(math.fsum(values) / len(values), min(values)), max(values)) if values else math.nan


def student_tails(t: float, degrees: float) -> float:
    """Return P(|T| >= |t|) for Student's T."""
    return float(2 * special.stdtr(degrees, -abs(t)))


def sign_test(one: int, other: int) -> float:
    """Return the one-sided mid-p value, <= 0.5, of ``one`` changes in one direction, ``other`` in the other.

    Without a preference, changes in one direction are Binomial(one + other, 1/2); the mid-p value counts half
    of the observed outcome. For pairs of 0 and 1 it is McNemar's exact test.
    """
    changed = one + other
    ways = [math.comb(changed, k) for k in range(min(one, other), -1, -1)]
    return min(0.5, (2 * sum(ways) - ways[0]) / (1 << (changed + 1)))  # integers: exact however small


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for multiple tests; NaN stays NaN and is not counted.

    Source: Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Statist. 6, 1979.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    corrected, largest = list(p_values), 0.0
    for rank, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - rank)))
        corrected[index] = largest
    return corrected


def rate_upper_bound(events: int, number: int, confidence: float = 0.95) -> float:
    """Return the upper end of the one-sided Clopper-Pearson interval of the rate ``events / number``.

    The true rate lies above it in at most ``1 - confidence`` of all samples (Clopper and Pearson, 1934).
    Without a sample it is 1.

    Raises:
        ValueError: ``events`` outside 0 to ``number``, or ``confidence`` outside (0, 1).

    >>> round(rate_upper_bound(0, 60), 4)  # about 3 / n
    0.0487
    """
    if not 0 <= events <= number or not 0.0 < confidence < 1.0:
        raise ValueError(f"{events!r} events in {number!r}, confidence {confidence!r}: out of range")
    return 1.0 if events == number else float(special.betaincinv(events + 1, number - events, confidence))


def compare_means(base: Sequence[float], other: Sequence[float], *, paired: bool) -> Difference:
    """Return the difference of means: over pairs that are finite on both sides, or of independent samples.

    Interval and p-value are Student's (Welch's if not ``paired``). Pairs of 0 and 1 get McNemar's exact test
    and the interval of Bonett and Price (2012), which is never empty. Without any variance there is no
    interval, and the p-value is from the sign test (paired) or a permutation of the values.

    Raises:
        ValueError: ``paired`` with sequences of different length.
    """
    if paired:
        pairs = [(a, b) for a, b in zip(base, other, strict=True) if math.isfinite(a) and math.isfinite(b)]
        first, second = [a for a, _ in pairs], [b for _, b in pairs]
    else:
        first, second = [a for a in base if math.isfinite(a)], [b for b in other if math.isfinite(b)]
    n, m = len(first), len(second)
    start, end = mean_of(first), mean_of(second)
    low = high = p_value = math.nan
    if min(n, m) > 1 and paired:
        differences = [b - a for a, b in zip(first, second, strict=True)]
        error = math.sqrt(variance(differences) / n)
        is_binary = {*first, *second} <= {0.0, 1.0}
        if not is_binary and not is_noise(error, [*first, *second]):
            low, high, p_value = _student(fmean(differences), error, n - 1)
        else:
            up, down = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
            p_value = _if_possible(2 * sign_test(up, down), least=2 * sign_test(n, 0))
            if is_binary:
                gained, lost = (up + 1) / (n + 2), (down + 1) / (n + 2)
                middle = gained - lost
                half = float(special.ndtri(1 - _LEVEL / 2)) * math.sqrt((gained + lost - middle**2) / (n + 2))
                low, high = max(-1.0, middle - half), min(1.0, middle + half)
    elif min(n, m) > 1:
        delta, a, b = end - start, variance(first) / n, variance(second) / m
        if is_noise(math.sqrt(a + b), [*first, *second]):
            least = 2 / math.comb(n + m, n)
            p_value = _if_possible(least if delta else 1.0, least=least)
        else:  # Welch-Satterthwaite
            degrees = (a + b) ** 2 / (a * a / (n - 1) + b * b / (m - 1))
            low, high, p_value = _student(delta, math.sqrt(a + b), degrees)
    return Difference(
        base=start,
        other=end,
        delta=end - start,
        low=low,
        high=high,
        p_value=p_value,
        n=min(n, m),
        paired=paired,
    )


def _student(delta: float, error: float, degrees: float) -> tuple[float, float, float]:
    """Return the ends of the interval and the p-value."""
    half = error * float(special.stdtrit(degrees, 1 - _LEVEL / 2))
    return delta - half, delta + half, student_tails(delta / error, degrees)


def is_noise(error: float, values: Sequence[float]) -> bool:
    """Whether the standard error is only rounding."""
    return error <= 1e-12 * max(map(abs, values))


def _if_possible(p_value: float, *, least: float) -> float:
    """Return ``p_value``, or NaN if ``least``, the smallest possible one, is not below 5 %."""
    return min(1.0, p_value) if least < _LEVEL else math.nan


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
