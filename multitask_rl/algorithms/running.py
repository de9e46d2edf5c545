"""Running statistics of one task's rewards, which make tasks of different reward scales comparable.

Averages are exponential over steps and bias-corrected (the first step counts fully). Every statistic is
exactly equivariant: rewards times 100 plus 7 give 100 times the scale from the first step on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_RATE = 0.05
"""Weight of the newest step once warmed up: a memory of about 20 steps."""
_LONG_RUN = 0.02
"""Weight of the newest step in the long-run average, as a part of its weight in the running one."""
_RELATIVE_FLOOR = 0.1
"""Lowest scale as a fraction of its long-run average; an absolute one would tie it to the reward's units."""
_NOISE = 1e-7
"""A deviation below this share of the mean is float32 rounding, not signal."""


def _step_weight(num_steps: int, rate: float) -> float:
    """Return the weight of step ``num_steps`` (1, 2, ...) in a bias-corrected average."""
    if num_steps == 1:
        return 1.0  # exactly: the formula's rounding would give a constant stream a variance
    return rate / (1.0 - (1.0 - rate) ** num_steps)


@dataclass
class RunningScale:
    """Root mean square of a stream of batches, at least a tenth of its long-run average.

    The floor limits the advantages when the scale vanishes. The long-run average has 50 times the memory, so
    the floor follows a scale that stays small. ``rate`` is the weight of the newest batch once warmed up.

    Pass only groups with variance: with the others, the scale (and the step size) would depend on how many
    groups were filtered.
    """

    rate: float = _RATE
    num_steps: int = 0
    mean_square: float = 0.0
    long_run: float = 0.0
    """Mean square with the longer memory."""

    @property
    def root(self) -> float:
        """Root mean square with its floor; 0 before the first update."""
        return max(math.sqrt(self.mean_square), _RELATIVE_FLOOR * math.sqrt(self.long_run))

    @property
    def value(self) -> float:
        """Divisor of deviations, > 0; 1 before the first update."""
        return self.root if self.num_steps else 1.0

    def update(self, mean_square: float) -> None:
        """Add one step's mean squared deviation."""
        self.num_steps += 1
        self.mean_square += _step_weight(self.num_steps, self.rate) * (mean_square - self.mean_square)
        slow = _step_weight(self.num_steps, _LONG_RUN * self.rate)
        self.long_run += slow * (mean_square - self.long_run)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {"num_steps": self.num_steps, "mean_square": self.mean_square, "long_run": self.long_run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self.num_steps = int(state["num_steps"])
        self.mean_square = float(state["mean_square"])
        self.long_run = float(state["long_run"])


class RunningMoments:
    """Mean and standard deviation of a stream of batches; ``rate`` is as in ``RunningScale``."""

    def __init__(self, rate: float = _RATE) -> None:
        self._rate = rate
        self.mean = 0.0
        self._spread = RunningScale(rate)

    @property
    def num_steps(self) -> int:
        """Batches seen."""
        return self._spread.num_steps

    @property
    def std(self) -> float:
        """Standard deviation, with the floor of ``RunningScale``; 0 if it is rounding noise of the mean."""
        std = self._spread.root
        return std if std > _NOISE * abs(self.mean) else 0.0

    def update(self, mean: float, variance: float) -> None:
        """Add one batch by its mean and population variance.

        Mixes central moments (not E[x^2] - E[x]^2), so a large common shift costs no digits.
        """
        weight = _step_weight(self.num_steps + 1, self._rate)
        shift = mean - self.mean
        self._spread.update(variance + (1.0 - weight) * shift * shift)
        self.mean += weight * shift

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {"mean": self.mean, "spread": self._spread.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self.mean = float(state["mean"])
        self._spread.load_state_dict(state["spread"])
