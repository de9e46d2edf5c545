"""The Lagrange multiplier of a task's constraint: the weight of a unit of cost against a unit of reward.

``max J_R  s.t.  J_C <= limit`` becomes ``A = (A_R - lambda * A_C) / (1 + lambda)``: advantages are combined,
not rewards. If ``r - lambda * c`` were divided by its own standard deviation in the group, lambda would act
only through the sign of ``1 - lambda``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from multitask_rl.config.task import MultiplierSpec
from multitask_rl.records import Event

__all__ = ["LagrangeMultiplier"]

_LOG_FLOOR = 0.01
"""``log``: lambda at or below this counts as 0; also the default start."""
_REPORTED_LOG_RATIO = math.log(1.2)


class LagrangeMultiplier:
    """Raise lambda while the mean cost is above its aim, lower it below; always in [0, max_value].

    With ``e = smoothed cost - setpoint * limit``:

    - ``pid``: ``I <- clip(I + K_I * e)``, ``lambda = clip(K_P * e + I + K_D * (smoothed cost's rise)^+)``.
      Source: Stooke, Achiam, Abbeel, "Responsive Safety in Reinforcement Learning by PID Lagrangian Methods"
      (arXiv:2007.03964), Algorithm 2; the proportional term damps the overshoot of the integral alone.
    - ``log``: ``log lambda <- clip(log lambda + rate * e)``. Source: Dai et al., "Safe RLHF"
      (arXiv:2310.12773), section 3.2.

    If all costs are 0, lambda stays exactly 0 and the run equals the unconstrained run. With a limit of 0,
    the excess is never negative.

    Args:
        limit: allowed mean cost, in [0, 1].
        config: default: ``MultiplierSpec()``.
    """

    def __init__(self, limit: float, config: MultiplierSpec | None = None) -> None:
        if not 0.0 <= limit <= 1.0:
            raise ValueError(f"the limit of a mean cost must be in [0, 1], got {limit!r}")
        self.limit = limit
        self.config = config or MultiplierSpec()
        self._average: float | None = None
        self._value = self._integral = self.config.initial_value
        self._log_value = math.log(max(_LOG_FLOOR, self.config.initial_value))
        self._reported = self._value

    @property
    def value(self) -> float:
        """lambda, >= 0."""
        return self._value

    def update(self, mean_cost: float, step: int) -> list[Event]:
        """Update lambda (``value``) from the costs of ``step``; return an event for a large change.

        Args:
            mean_cost: mean cost of the step's rollouts, in [0, 1]; NaN (no rollout was judged) has no effect.
            step: step of the costs.
        """
        if not math.isfinite(mean_cost):
            return []
        before = self._average
        average = mean_cost if before is None else before + self.config.smoothing * (mean_cost - before)
        self._average = average
        excess = average - self.config.setpoint * self.limit
        rise = 0.0 if before is None else max(0.0, average - before)
        self._value = self._pid(excess, rise) if self.config.mode == "pid" else self._log(excess)
        return self._report(step)

    def _pid(self, excess: float, rise: float) -> float:
        config = self.config
        self._integral = self._clip(self._integral + config.integral * excess)
        return self._clip(config.proportional * excess + self._integral + config.derivative * rise)

    def _log(self, excess: float) -> float:
        low, high = math.log(_LOG_FLOOR), math.log(self.config.max_value)
        self._log_value = min(high, max(low, self._log_value + self.config.log_rate * excess))
        return self._clip(math.exp(self._log_value)) if self._log_value > low else 0.0

    def _report(self, step: int) -> list[Event]:
        """Return an event when the part of the reward in the update, 1 / (1 + lambda), moved by a fifth."""
        old, new = self._reported, self._value
        at_bound = new >= self.config.max_value > old
        if not at_bound and abs(math.log((1.0 + new) / (1.0 + old))) < _REPORTED_LOG_RATIO:
            return []
        self._reported = new
        reason = (
            f"multiplier {old:.2f} -> {new:.2f}: mean cost {self._average:.3f}, limit {self.limit:g}, aim "
            f"{self.config.setpoint * self.limit:.3f}"
        )
        if at_bound:
            reason += "; this is its upper bound, so the limit may be out of reach"
        data = {"from": old, "to": new, "cost_average": self._average, "limit": self.limit}
        kind = "alarm" if at_bound else "multiplier"
        return [Event(step=step, source="multiplier", kind=kind, reason=reason, data=data)]

    def _clip(self, value: float) -> float:
        return min(self.config.max_value, max(0.0, value))

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {
            "average": self._average,
            "integral": self._integral,
            "log_value": self._log_value,
            "value": self._value,
            "reported": self._reported,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._average = state["average"]
        self._integral = state["integral"]
        self._log_value = state["log_value"]
        self._value = state["value"]
        self._reported = state["reported"]
