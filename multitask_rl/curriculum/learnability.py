"""Prompts go to tasks whose rewards differ within a group: medium difficulty teaches most per rollout."""

from __future__ import annotations

from dataclasses import dataclass

from multitask_rl.config.schema.ranges import Positive, PositiveFraction
from multitask_rl.curriculum.base import SchedulerPolicy, SchedulerPolicyConfig, softmax
from multitask_rl.curriculum.signal import TaskTrace


class Learnability(SchedulerPolicy):
    """Boltzmann weights over the smoothed spread of rewards within groups.

    ``r_k = prior_k * exp(Q_k / temperature)``, normalised; ``Q_k`` is the moving average of the standard
    deviation within groups on the scale of levels, ``sqrt(p (1 - p))`` for a 0/1 reward, cleared of noise
    (``SchedulerPolicy.clear``). Of a task with one response per prompt it is ``sqrt(p (1 - p))`` of its level
    ``p``. It ignores targets: a task whose level is near 0 gets only its floor.

    Source: SEC (arXiv:2505.14970), Algorithm 1, and DUMP (arXiv:2504.09710). Both use the mean absolute
    advantage, which depends on the algorithm; the spread does not. For a 0/1 reward, with advantages divided
    by the group's standard deviation, it is ``2 sqrt(p (1 - p))``: twice the spread.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SchedulerPolicyConfig):
        """Settings of ``learnability``."""

        smoothing: PositiveFraction = 0.2
        """Gain of the moving averages per step."""
        temperature: Positive = 0.1
        """Temperature of the softmax over values in [0, 0.5]; smaller = greedier."""

    config: Config

    def _preferences(self) -> dict[str, float]:
        found = {t: self.traces[t].spread for t in self.tasks if self.traces[t].steps}
        spreads = self.clear({t: s for t, (s, _) in found.items()}, {t: e for t, (_, e) in found.items()})
        values = softmax(spreads, self.config.temperature) if spreads else {}
        return {task: self.prior[task] * values.get(task, 0.0) for task in self.tasks}

    def _reason(self, task: str, trace: TaskTrace) -> str:
        return f"spread within groups {trace.spread[0]:.3f}"
