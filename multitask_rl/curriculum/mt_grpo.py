"""MT-GRPO: weight moves to the task with the lowest sum of level and recent improvement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from multitask_rl.config.schema.ranges import NotNegative, Positive, PositiveFraction
from multitask_rl.curriculum.base import SchedulerPolicy, SchedulerPolicyConfig, softmax


class MTGRPO(SchedulerPolicy):
    """Move the logits against each task's level and improvement.

    ``s_k = I_k + lambda * J_k``, ``z = softmax(xi)``, ``xi_k <- xi_k - beta * z_k * (s_k - sum_j z_j s_j)``:
    gradient descent on the mixture's expected score, so that weight flows to the task with the lowest score.
    ``J_k`` is the smoothed level, at most the target, cleared of noise (``SchedulerPolicy.clear``). ``I_k``
    is the change of the smoothed level over the step (0 for a task not sampled).

    Source: "Multi-Task GRPO" (arXiv:2602.05547), Subroutine 1, with the change of the level as improvement
    (the GRPO loss is 0 both for tasks that always fail and tasks that never fail) and a plain step, not Adam.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SchedulerPolicyConfig):
        """Settings of ``mt_grpo``. At LLM scale the paper runs level_weight 0.2 to 0.25 with rate 0.025."""

        smoothing: PositiveFraction = 0.2
        """Gain of the moving averages per step."""
        rate: Positive = 1.0
        """Step size beta on the logits."""
        level_weight: NotNegative = 0.5
        """lambda: weight of the level beside the improvement; larger = closer to the worst task only."""

    per_task: ClassVar[tuple[str, ...]] = ("logits",)
    config: Config

    def _start(self) -> None:
        self.logits = dict.fromkeys(self.tasks, 0.0)
        """Learnt difference from the logarithm of the prior; a resume may change the prior."""

    def _learn(self, progress: Mapping[str, float]) -> None:
        seen = [task for task in self.tasks if self.traces[task].steps]
        probs = self._probabilities(seen)
        levels = self.clear(
            {task: min(self.traces[task].level, self.targets[task]) for task in seen},
            {task: self.traces[task].level_error for task in seen},
        )
        scores = {
            task: progress.get(task, 0.0) + self.config.level_weight * level for task, level in levels.items()
        }
        mean = math.fsum(probs[task] * scores[task] for task in seen)
        for task in seen:
            self.logits[task] -= self.config.rate * probs[task] * (scores[task] - mean)

    def _preferences(self) -> dict[str, float]:
        return self._probabilities(self.tasks)

    def _probabilities(self, tasks: Iterable[str]) -> dict[str, float]:
        return softmax({task: math.log(self.prior[task]) + self.logits[task] for task in tasks})
