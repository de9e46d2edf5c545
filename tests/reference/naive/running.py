"""Running statistics of rewards: averages over steps, each step's weight corrected for the start."""

from __future__ import annotations

import math


def _weight(step: int, rate: float) -> float:
    """Weight of step 1, 2, ... in ``sum_s rate (1 - rate)^(n - s) x_s / sum of those weights``."""
    return 1.0 if step == 1 else rate / (1.0 - (1.0 - rate) ** step)


class Scale:
    """Root mean square of deviations within groups, over about 20 steps; at least a tenth of its highest."""

    def __init__(self) -> None:
        self.steps, self.mean_square, self.peak = 0, 0.0, 0.0

    def add(self, mean_square: float) -> None:
        self.steps += 1
        w = _weight(self.steps, 0.05)
        self.mean_square = (1.0 - w) * self.mean_square + w * mean_square
        self.peak = max(self.peak, math.sqrt(self.mean_square))

    @property
    def value(self) -> float:
        return max(math.sqrt(self.mean_square), 0.1 * self.peak) if self.steps else 1.0


class Moments:
    """Mean and deviation of all values seen, step by step weighted."""

    def __init__(self, rate: float) -> None:
        self.rate, self.steps, self.mean, self.second, self.peak = rate, 0, 0.0, 0.0, 0.0

    def add(self, mean: float, variance: float) -> None:
        self.steps += 1
        w = _weight(self.steps, self.rate)
        self.mean, self.second = (
            (1.0 - w) * self.mean + w * mean,
            (1.0 - w) * self.second + w * (variance + mean * mean),
        )
        self.peak = max(self.peak, self.plain_std)

    @property
    def plain_std(self) -> float:
        variance = self.second - self.mean**2
        return math.sqrt(variance) if variance > 1e-12 * self.second else 0.0

    @property
    def std(self) -> float:
        return max(self.plain_std, 0.1 * self.peak)
