"""Running statistics of rewards: averages over steps, each step's weight corrected for the start."""

from __future__ import annotations

import math
from collections.abc import Sequence

LONG_RUN = 50.0
"""The floor's memory in memories of the statistic itself."""


def average(steps: Sequence[float], rate: float) -> float:
    """Return ``sum_s rate (1 - rate)^(n - s) x_s`` over the sum of those weights; 0 without a step."""
    if not steps:
        return 0.0
    weights = [(1.0 - rate) ** (len(steps) - 1 - s) for s in range(len(steps))]
    return math.fsum(w * x for w, x in zip(weights, steps, strict=True)) / math.fsum(weights)


class Scale:
    """Root mean square of deviations, over ``1 / rate`` steps; at least a tenth of its long-run value."""

    def __init__(self, rate: float = 0.05) -> None:
        self.rate = rate
        self.squares: list[float] = []
        """Mean square of each step."""

    def add(self, mean_square: float) -> None:
        self.squares.append(mean_square)

    @property
    def value(self) -> float:
        if not self.squares:
            return 1.0
        long_run = average(self.squares, self.rate / LONG_RUN)
        return math.sqrt(max(average(self.squares, self.rate), 0.01 * long_run))


class Moments:
    """Mean and deviation of all values seen, step by step weighted."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.means: list[float] = []
        self.variances: list[float] = []

    def add(self, mean: float, variance: float) -> None:
        self.means.append(mean)
        self.variances.append(variance)

    @property
    def mean(self) -> float:
        return average(self.means, self.rate)

    def variance(self, rate: float) -> float:
        centre = average(self.means, rate)
        within = zip(self.means, self.variances, strict=True)
        return average([v + (m - centre) ** 2 for m, v in within], rate)

    @property
    def std(self) -> float:
        """At least a tenth of its long-run value; 0 where it is rounding."""
        std = math.sqrt(max(self.variance(self.rate), 0.01 * self.variance(self.rate / LONG_RUN)))
        return std if std > 1e-7 * abs(self.mean) else 0.0
