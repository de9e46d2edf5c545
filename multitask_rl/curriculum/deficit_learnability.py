"""Prompts go where there is something left to learn and something to learn it from. The default policy.

A task far below its target deserves rollouts, but only in so far as they give a gradient: a task whose
groups are all failures (or all successes) would take the budget and return nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from multitask_rl.config.schema.ranges import Count, Positive, PositiveFraction
from multitask_rl.curriculum.base import SchedulerPolicy, SchedulerPolicyConfig

__all__ = ["DeficitLearnability", "DeficitLearnabilityConfig"]


@dataclass(kw_only=True, slots=True)
class DeficitLearnabilityConfig(SchedulerPolicyConfig):
    """Settings of ``deficit_learnability``."""

    prompts_averaged: Count = 100
    """A level's standard error is then about 0.03 in every task: a task with few prompts is not taken for the
    worst by chance."""
    sharpness: Positive = 8.0
    """Exponent of the whole score: 1 shares in proportion to it, larger goes to the highest score."""
    min_informative: PositiveFraction = 0.02
    """Least share of informative groups counted, so that a hard task is not forgotten."""
    enough_informative: PositiveFraction = 0.25
    """Share of informative groups from which on a task counts as learnable like any other."""


class DeficitLearnability(SchedulerPolicy):
    """Weigh each task by its distance to the target times what its groups can teach.

    ``s_k = (target_k - J_k)^+ * sqrt(min(1, max(nz_k, min_informative) / enough_informative))``, cleared of
    noise (``SchedulerPolicy.clear``), ``r = prior * s^a / sum(prior * s^a)``, with ``J_k`` the smoothed level
    in [0, 1], ``nz_k`` the smoothed share of groups with a gradient and ``a`` the sharpness. All tasks at
    their targets: the prior.

    Learnability holds back tasks that are hopeless so far. Among tasks that do learn it must not decide: one
    has few informative groups while it is hard and again when most of its prompts are solved.
    In proportion (a = 1) the tasks nearly learnt keep a third of what is free between them; what is free does
    more for the worst task and no less for the mean where the score is highest (``benchmarks/multitask.py
    scheduler``). The floor keeps the others from being forgotten.

    Source: own. The deficit is the minimax signal of MT-GRPO (arXiv:2602.05547) without its collapse onto one
    task; the square root of the informative share is the learnability of SEC (arXiv:2505.14970), as the
    standard error of a group's gradient shrinks with the square root of the groups that have one.
    """

    Config: ClassVar[type[SchedulerPolicyConfig]] = DeficitLearnabilityConfig
    config: DeficitLearnabilityConfig

    def _preferences(self) -> dict[str, float]:
        scores, errors = {}, {}
        for task in self.tasks:
            if self.traces[task].steps:
                deficit = self.deficit(task)
                learnable, error = self._learnability(task)
                scores[task] = deficit * learnable
                errors[task] = math.hypot(learnable * self.level_error(task), deficit * error)
        top = max(scores.values(), default=0.0)
        if not top > 0.0:
            return dict.fromkeys(self.tasks, 0.0)
        cleared = self.clear(scores, errors)
        sharpness = self.config.sharpness
        return {t: self.prior[t] * (cleared.get(t, 0.0) / top) ** sharpness for t in self.tasks}

    def _learnability(self, task: str) -> tuple[float, float]:
        """Return what the task's groups can teach, in (0, 1], and its standard error."""
        informative = max(self.informative(task), self.config.min_informative)
        if informative >= self.config.enough_informative:
            return 1.0, 0.0
        learnable = math.sqrt(informative / self.config.enough_informative)
        return learnable, min(0.5, 0.5 * learnable * self.traces[task].informative_error / informative)
