"""Prompts go where rewards differ within a group: the tasks of middling difficulty teach most per rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from multitask_rl.curriculum.base import SchedulerPolicy, SchedulerPolicyConfig, softmax
from multitask_rl.curriculum.signal import TaskSignal

__all__ = ["Learnability", "LearnabilityConfig"]

_FIRST_VALUE = 0.5
"""The largest standard deviation of a reward in [0, 1]: a task is worth trying until it has been seen."""


@dataclass(kw_only=True, slots=True)
class LearnabilityConfig(SchedulerPolicyConfig):
    """Settings of ``learnability``."""

    smoothing: float = 0.2
    """Gain of the moving averages per step, in (0, 1]."""
    temperature: float = 0.1
    """Of the softmax over values in [0, 0.5], > 0; smaller = greedier."""

    def __post_init__(self) -> None:
        """Check ranges."""
        SchedulerPolicyConfig.__post_init__(self)
        if not self.temperature > 0.0:
            raise ValueError(f"temperature must be > 0, got {self.temperature!r}")


class Learnability(SchedulerPolicy):
    """Boltzmann weights over the smoothed spread of rewards within groups.

    ``Q_k <- Q_k + smoothing * (sigma_k - Q_k)``, ``w_k = prior_k * exp(Q_k / temperature)``, normalised;
    ``sigma_k`` is the mean standard deviation within groups on the scale of levels, ``sqrt(p (1 - p))`` for a
    0/1 reward. It does not know which task matters: tasks near 0 get their floor however far behind they are.

    Source: SEC (arXiv:2505.14970), Algorithm 1, and DUMP (arXiv:2504.09710); both use the mean absolute
    advantage, which is constant for every mixed group once divided by the group's standard deviation, so the
    spread itself is used here.
    """

    Config: ClassVar[type[SchedulerPolicyConfig]] = LearnabilityConfig
    per_task: ClassVar[tuple[str, ...]] = ("values",)
    config: LearnabilityConfig

    def _start(self) -> None:
        self.values = dict.fromkeys(self.tasks, _FIRST_VALUE)

    def _learn(self, signals: Mapping[str, TaskSignal], step: int) -> None:
        for task, signal in signals.items():
            self.values[task] += self.config.smoothing * (signal.spread - self.values[task])

    def _preferences(self) -> dict[str, float]:
        values = softmax(self.values, self.config.temperature)
        return {task: self.prior[task] * values[task] for task in self.tasks}

    def reasons(self) -> dict[str, str]:
        """Return the spread per task."""
        return {task: f"spread within groups {self.values[task]:.3f}" for task in self.tasks}
