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

    If all costs are 0, lambda is exactly 0 and the run equals the unconstrained run. ``limit`` is the allowed
    mean cost, in [0, 1]; with 0 the excess is never negative.
    """

    def __init__(self, limit: float, config: MultiplierSpec | None = None) -> None:
        if not 0.0 <= limit <= 1.0:
            raise ValueError(f"the limit of a mean cost must be in [0, 1], got {limit!r}")
        self.limit = limit
        self.config = config or MultiplierSpec()
        self._average: float | None = None
        self.value = self._integral = self.config.initial_value
        """lambda, >= 0."""
        self._log_value = math.log(max(_LOG_FLOOR, self.config.initial_value))
        self._reported = self.value

    def update(self, mean_cost: float, step: int) -> list[Event]:
        """Update ``value`` by the mean cost of a step, in [0, 1]; NaN (no rollout was judged) has no effect.

        Return an event if 1 / (1 + lambda), the weight of the reward in the update, moves by a fifth.
        """
        if not math.isfinite(mean_cost):
            return []
        config, before = self.config, self._average
        average = mean_cost if before is None else before + config.smoothing * (mean_cost - before)
        self._average = average
        excess = average - config.setpoint * self.limit
        if config.mode == "pid":
            rise = 0.0 if before is None else max(0.0, average - before)
            self._integral = _clip(self._integral + config.integral * excess, 0.0, config.max_value)
            value = config.proportional * excess + self._integral + config.derivative * rise
        else:
            low, high = math.log(_LOG_FLOOR), math.log(config.max_value)
            self._log_value = _clip(self._log_value + config.log_rate * excess, low, high)
            value = math.exp(self._log_value) if self._log_value > low else 0.0
        self.value = new = _clip(value, 0.0, config.max_value)
        old = self._reported
        at_bound = new >= config.max_value > old
        if not at_bound and abs(math.log((1.0 + new) / (1.0 + old))) < _REPORTED_LOG_RATIO:
            return []
        self._reported = new
        reason = (
            f"multiplier {old:.2f} -> {new:.2f}: mean cost {average:.3f}, limit {self.limit:g}, aim "
            f"{config.setpoint * self.limit:.3f}"
        )
        if at_bound:
            reason += "; this is its upper bound, so the limit may be out of reach"
        data = {"from": old, "to": new, "cost_average": average, "limit": self.limit}
        kind = "alarm" if at_bound else "multiplier"
        return [Event(step=step, source="multiplier", kind=kind, reason=reason, data=data)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        own = {"average": self._average, "integral": self._integral, "log_value": self._log_value}
        return {**own, "value": self.value, "reported": self._reported, "mode": self.config.mode}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``; lambda goes on from there if ``mode`` or ``max_value`` has changed."""
        self._average = state["average"]
        self._integral, self._log_value = state["integral"], state["log_value"]
        if state.get("mode", self.config.mode) != self.config.mode:
            self._integral, self._log_value = state["value"], math.log(max(state["value"], _LOG_FLOOR))
        self.value, self._reported = min(state["value"], self.config.max_value), state["reported"]


def _clip(value: float, low: float, high: float) -> float:
    return min(high, max(low, value))
