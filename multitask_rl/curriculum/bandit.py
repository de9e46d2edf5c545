"""A bandit over tasks: its gain is learning progress, and it keeps exploring all tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from multitask_rl.config.schema.ranges import Fraction, Positive, Range
from multitask_rl.curriculum.base import NOISE, SchedulerPolicy, SchedulerPolicyConfig, softmax

_MIN_SCALE = 1e-3


class Bandit(SchedulerPolicy):
    """Exponential weights with sharing (Exp3.S) on the change of each task's level.

    ``v_k <- v_k * exp(eta * g_k)`` for sampled tasks, then ``v <- (1 - share) * v / sum(v) + share * prior``;
    ``w = (1 - exploration) * v / sum(v) + exploration * prior``. The gain ``g_k`` in [-1, 1] is the step's
    change of the smoothed level, divided by the largest recent change of any task or by two standard errors
    of a level, whichever is larger. Nearly every step samples every task, so gains are not divided by the
    probability of a draw. Progress is a small difference of noisy numbers: this policy needs many prompts per
    step or many steps.

    Source: Auer et al., "The nonstochastic multiarmed bandit problem", SIAM J. Comput. 32, 2002, section 8;
    as a curriculum: Graves et al. (arXiv:1704.03003), with their reward rescaling by recent extremes.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SchedulerPolicyConfig):
        """Settings of ``bandit``."""

        rate: Positive = 0.1
        """Step size eta on the log-weights."""
        share: Annotated[float, Range("[0, 1)")] = 0.01
        """Part of the mass returned to the prior each step; larger forgets faster."""
        exploration: Fraction = 0.1
        """Part of the prompts allotted by the prior."""

    per_task: ClassVar[tuple[str, ...]] = ("log_values", "scale")
    config: Config

    def _start(self) -> None:
        self.log_values = dict.fromkeys(self.tasks, 0.0)
        """Learnt difference from the logarithm of the prior; a resume may change the prior."""
        self.scale = dict.fromkeys(self.tasks, _MIN_SCALE)
        """Largest recent change of each task's level; decays by 1 % per step."""

    def _learn(self, progress: Mapping[str, float]) -> None:
        for task, change in progress.items():
            self.scale[task] = max(0.99 * self.scale[task], abs(change), _MIN_SCALE)
        errors = [self.traces[task].level_error for task in progress]
        largest = max(*self.scale.values(), NOISE * max(errors))
        for task, change in progress.items():
            self.log_values[task] += self.config.rate * change / largest
        share = self.config.share
        for task, p in self._probabilities().items():
            mixed = (1.0 - share) * p + share * self.prior[task]
            self.log_values[task] = math.log(max(mixed, 1e-300) / self.prior[task])

    def _probabilities(self) -> dict[str, float]:
        return softmax({task: math.log(self.prior[task]) + v for task, v in self.log_values.items()})

    def _preferences(self) -> dict[str, float]:
        probs, explore = self._probabilities(), self.config.exploration
        return {task: (1.0 - explore) * probs[task] + explore * self.prior[task] for task in self.tasks}
