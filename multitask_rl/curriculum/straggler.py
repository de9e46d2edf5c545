"""Lower the weight of tasks that learn fast and raise the weight of tasks that lag behind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from multitask_rl.config.schema.ranges import NotNegative
from multitask_rl.curriculum.base import SchedulerPolicy, SchedulerPolicyConfig
from multitask_rl.curriculum.signal import TaskTrace

_START_STEPS = 10
_MIN_START_DEFICIT = 1e-6


class Straggler(SchedulerPolicy):
    """Weigh each task by the remaining part of its distance to the target.

    ``r_k = (target_k - J_k)^+ / (target_k - J_k at the start)``,
    ``w_k = prior_k * r_k^exponent``, normalised, ``r`` cleared of noise (``SchedulerPolicy.clear``); the
    start is the mean level of the task's first ten steps. A task at its target has r = 0.

    Source: the inverse training rate of Chen et al., "GradNorm" (arXiv:1711.02257), Eq. 2 (exponent 1.5 as
    there), with distance to the target in place of the loss and shares in place of gradient norms.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SchedulerPolicyConfig):
        """Settings of ``straggler``."""

        exponent: NotNegative = 1.5
        """How strongly laggards are favoured; 0 = the prior."""

    per_task: ClassVar[tuple[str, ...]] = ("start_level",)
    config: Config

    def _start(self) -> None:
        self.start_level = dict.fromkeys(self.tasks, 1.0)
        """Level after the first steps."""

    def _learn(self, progress: Mapping[str, float]) -> None:
        for task in progress:
            if self.traces[task].steps <= _START_STEPS:
                self.start_level[task] = self.traces[task].level

    def _start_deficit(self, task: str) -> float:
        return max(0.0, self.targets[task] - self.start_level[task])

    def _remaining(self, task: str) -> float:
        start = self._start_deficit(task)
        return self.deficit(task) / start if start > _MIN_START_DEFICIT else 0.0

    def _preferences(self) -> dict[str, float]:
        remaining = {t: self._remaining(t) for t in self.tasks if self.traces[t].steps}
        if not any(remaining.values()):
            return dict.fromkeys(self.tasks, 0.0)
        errors = {  # from the level now and the level at the start
            t: self.traces[t].level_error * math.hypot(1.0, part) / self._start_deficit(t) if part else 0.0
            for t, part in remaining.items()
        }
        cleared = self.clear(remaining, errors)
        return {t: self.prior[t] * cleared.get(t, 0.0) ** self.config.exponent for t in self.tasks}

    def _reason(self, task: str, trace: TaskTrace) -> str:
        return f"{self._remaining(task):.0%} of the distance to target {self.targets[task]:.2f} remains"
