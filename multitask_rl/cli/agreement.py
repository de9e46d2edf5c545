"""How far two rewards agree about the same responses: correlations and a two-by-two table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Agreement", "agreement", "pearson", "spearman"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Of the responses that both rewards scored."""

    count: int
    pearson: float
    """Correlation of the values; NaN where one side gave one value only."""
    spearman: float
    """Correlation of the ranks."""
    both_high: int
    only_before: int
    only_now: int
    both_low: int
    borders: tuple[float, float]
    """From which value on a response counts as high, before and now."""

    @property
    def agreed(self) -> float:
        """Share of the responses that both call high or both call low."""
        return (self.both_high + self.both_low) / self.count if self.count else math.nan


def agreement(before: Sequence[float], now: Sequence[float], *, threshold: float | None = None) -> Agreement:
    """Compare the values of two rewards, response by response.

    Args:
        before: values [N], finite.
        now: values [N] of the same responses, finite.
        threshold: from where on a value counts as high; None = 0.5 where all values lie in [0, 1], else the
            middle between the smallest and the largest of each side.
    """
    borders = _border(before, threshold), _border(now, threshold)
    counts = {(a, b): 0 for a in (True, False) for b in (True, False)}
    for x, y in zip(before, now, strict=True):
        counts[x >= borders[0], y >= borders[1]] += 1
    return Agreement(
        count=len(before),
        pearson=pearson(before, now),
        spearman=spearman(before, now),
        both_high=counts[True, True],
        only_before=counts[True, False],
        only_now=counts[False, True],
        both_low=counts[False, False],
        borders=borders,
    )


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the linear correlation; NaN for fewer than two values or a constant side.

    >>> pearson([1, 2, 3], [2, 4, 6])
    1.0
    """
    if len(x) < 2:
        return math.nan
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    dx, dy = [a - mean_x for a in x], [b - mean_y for b in y]
    norm = math.sqrt(math.fsum(a * a for a in dx) * math.fsum(b * b for b in dy))
    return math.fsum(a * b for a, b in zip(dx, dy, strict=True)) / norm if norm > 0 else math.nan


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the correlation of the ranks; equal values share their mean rank.

    >>> spearman([1, 2, 30], [0.1, 5, 6])
    1.0
    """
    return pearson(_ranks(x), _ranks(y))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    begin = 0
    while begin < len(order):
        end = begin
        while end < len(order) and values[order[end]] == values[order[begin]]:
            end += 1
        for index in order[begin:end]:
            ranks[index] = (begin + end - 1) / 2
        begin = end
    return ranks


def _border(values: Sequence[float], threshold: float | None) -> float:
    if threshold is not None:
        return threshold
    low, high = min(values, default=0.0), max(values, default=1.0)
    return 0.5 if low >= 0.0 and high <= 1.0 else (low + high) / 2
