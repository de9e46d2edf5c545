"""Running statistics of one task's rewards: the state that makes tasks of any reward scale comparable.

Averages are exponential over steps with the start-up weight corrected (the first step counts fully), so every
statistic is exactly equivariant: rewards times 100 plus 7 give 100 times the scale from the first step on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["RunningMoments", "RunningScale"]

_RATE = 0.05
"""Weight of the newest step once warmed up: a memory of about 20 steps."""

_RELATIVE_FLOOR = 0.1
"""Lowest scale as a fraction of the highest seen; an absolute floor would tie it to the reward's units."""

_NOISE = 1e-7
"""A deviation below this share of the mean is float32 rounding, not signal."""


def _step_weight(num_steps: int, rate: float = _RATE) -> float:
    """Return the weight of step ``num_steps`` (1, 2, ...) in a bias-corrected average."""
    if num_steps == 1:
        return 1.0  # exactly: the formula's rounding would give a constant stream a variance
    return rate / (1.0 - (1.0 - rate) ** num_steps)


class RunningMoments:
    """Mean and standard deviation of a stream of batches.

    Args:
        rate: weight of the newest batch once warmed up, in (0, 1].
    """

    def __init__(self, rate: float = _RATE) -> None:
        self._rate = rate
        self.num_steps = 0
        self.mean = 0.0
        self.variance = 0.0
        self.peak = 0.0

    @property
    def std(self) -> float:
        """Standard deviation, at least a tenth of the highest seen; 0 where it is rounding noise."""
        std = max(math.sqrt(self.variance), _RELATIVE_FLOOR * self.peak)
        return std if std > _NOISE * abs(self.mean) else 0.0

    def update(self, mean: float, variance: float) -> None:
        """Add one batch by its mean and population variance.

        Mixes central moments (not E[x^2] - E[x]^2), so a large common shift costs no digits.
        """
        self.num_steps += 1
        weight = _step_weight(self.num_steps, self._rate)
        shift = mean - self.mean
        self.variance = (1.0 - weight) * (self.variance + weight * shift * shift) + weight * variance
        self.mean += weight * shift
        self.peak = max(self.peak, math.sqrt(self.variance))

    def state_dict(self) -> dict[str, Any]:
        """State, JSON-able."""
        return {
            "num_steps": self.num_steps,
            "mean": self.mean,
            "variance": self.variance,
            "peak": self.peak,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self.num_steps = int(state["num_steps"])
        self.mean = float(state["mean"])
        self.variance = float(state["variance"])
        self.peak = float(state["peak"])


class RunningScale:
    """Root mean square of within-group deviations, of the groups that have any.

    Groups without variance are left out: they carry no gradient, and counting them would make the scale (and
    with it the step size of the others) depend on how many of them were filtered before.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.mean_square = 0.0
        self.peak = 0.0

    @property
    def value(self) -> float:
        """Divisor of deviations, > 0; 1 before anything was seen."""
        if self.num_steps == 0:
            return 1.0
        return max(math.sqrt(self.mean_square), _RELATIVE_FLOOR * self.peak)

    def update(self, mean_square: float) -> None:
        """Add one step's mean squared deviation, > 0."""
        self.num_steps += 1
        self.mean_square += _step_weight(self.num_steps) * (mean_square - self.mean_square)
        self.peak = max(self.peak, math.sqrt(self.mean_square))

    def state_dict(self) -> dict[str, Any]:
        """State, JSON-able."""
        return {"num_steps": self.num_steps, "mean_square": self.mean_square, "peak": self.peak}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self.num_steps = int(state["num_steps"])
        self.mean_square = float(state["mean_square"])
        self.peak = float(state["peak"])
