"""Differences of held-out means, paired where prompts are the same, with 95 % intervals; bounds of rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

__all__ = ["Difference", "compare_means", "rate_upper_bound", "student_quantile"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """``other - base`` of a mean."""

    base: float
    other: float
    delta: float
    low: float
    """Lower end of the 95 % interval of ``delta``; NaN with fewer than two values."""
    high: float
    n: int
    """Prompts behind it (pairs, or the smaller side)."""
    paired: bool

    def verdict(self, higher_is_better: bool) -> str:
        """Return ``better``, ``worse``, ``same`` (the interval holds 0) or ``unknown`` (too few values)."""
        if math.isnan(self.low):
            return "unknown"
        if self.low <= 0 <= self.high:
            return "same"
        return "better" if (self.delta > 0) == higher_is_better else "worse"


def student_quantile(probability: float, degrees: float) -> float:
    """Return the quantile of Student's t.

    Cornish-Fisher expansion around the normal (Abramowitz and Stegun 26.7.5); exact forms for one and two
    degrees of freedom, where it is poor. Error under 1 % of the quantile from three degrees on.

    >>> round(student_quantile(0.975, 10), 2)
    2.23
    """
    if degrees <= 0:
        raise ValueError(f"degrees of freedom must be > 0, got {degrees!r}")
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        centred = 2 * probability - 1
        return centred * math.sqrt(2 / (1 - centred * centred))
    z, v = NormalDist().inv_cdf(probability), degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


def rate_upper_bound(events: int, number: int, confidence: float = 0.95) -> float:
    """Return the upper end of the one-sided Clopper-Pearson interval of a rate.

    It is the rate p at which so few events or fewer have probability ``1 - confidence``: the true rate lies
    above it in at most that share of all samples (Clopper and Pearson, 1934). Without a sample it is 1.

    Args:
        events: how often it happened, 0 to ``number``.
        number: how often it could have.
        confidence: in (0, 1).

    Raises:
        ValueError: ``events`` outside 0 to ``number``, or ``confidence`` outside (0, 1).

    >>> round(rate_upper_bound(0, 60), 4)  # about 3 / n
    0.0487
    """
    if not 0 <= events <= number or not 0.0 < confidence < 1.0:
        raise ValueError(f"{events!r} events in {number!r}, confidence {confidence!r}: out of range")
    if events == number:
        return 1.0
    ways = [
        math.lgamma(number + 1) - math.lgamma(k + 1) - math.lgamma(number - k + 1) for k in range(events + 1)
    ]
    low, high = events / number, 1.0
    for _ in range(60):  # halving: the probability falls as p rises
        p = (low + high) / 2
        if p in (low, high):
            break
        at_most = math.fsum(
            math.exp(w + k * math.log(p) + (number - k) * math.log1p(-p)) for k, w in enumerate(ways)
        )
        low, high = (p, high) if at_most > 1.0 - confidence else (low, p)
    return high


def compare_means(base: Sequence[float], other: Sequence[float], *, paired: bool) -> Difference:
    """Return the difference of means, over pairs that are finite on both sides, or Welch's if not ``paired``.

    Raises:
        ValueError: ``paired`` with sequences of different length.
    """
    if paired:
        pairs = [(a, b) for a, b in zip(base, other, strict=True) if math.isfinite(a) and math.isfinite(b)]
        first, second = [a for a, _ in pairs], [b for _, b in pairs]
        differences = [b - a for a, b in pairs]
        error = math.sqrt(variance(differences) / len(pairs)) if len(pairs) > 1 else math.nan
        degrees = float(len(pairs) - 1)
    else:
        first, second = [a for a in base if math.isfinite(a)], [b for b in other if math.isfinite(b)]
        error, degrees = _welch(first, second)
    start, end = (fmean(side) if side else math.nan for side in (first, second))
    half = error * student_quantile(0.975, degrees) if degrees > 0 and not math.isnan(error) else math.nan
    return Difference(
        base=start,
        other=end,
        delta=end - start,
        low=end - start - half,
        high=end - start + half,
        n=min(len(first), len(second)),
        paired=paired,
    )


def _welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return standard error and degrees of freedom (Welch-Satterthwaite)."""
    if len(first) < 2 or len(second) < 2:
        return math.nan, 0.0
    a, b = variance(first) / len(first), variance(second) / len(second)
    if a + b == 0:
        return 0.0, float(len(first) + len(second) - 2)
    degrees = (a + b) ** 2 / (a * a / (len(first) - 1) + b * b / (len(second) - 1))
    return math.sqrt(a + b), degrees
