"""Prompts go to tasks that can be learnt now and whose gradients agree with those of the other tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from multitask_rl.config.schema.ranges import Count, NotNegative
from multitask_rl.curriculum.base import softmax
from multitask_rl.curriculum.learnability import Learnability
from multitask_rl.curriculum.signal import TaskTrace
from multitask_rl.records import TaskStats


class TAC(Learnability):
    """Transfer-aware curriculum: learnability times what an update on the task does for the others.

    ``r_k = prior_k * exp(s_k / temperature)``, normalised, with ``s_k = Q_k * max(0, 1 + alpha * T_k)``,
    cleared of noise (``SchedulerPolicy.clear``). ``Q_k`` is that of ``learnability``. ``T_k`` in [-1, 1], the
    transfer, is the mean cosine between the gradient of ``k`` and those of the other tasks, weighted by their
    priors and smoothed over comparisons. A task without a comparison has ``T_k = 0``.

    A cosine of noisy gradients is nearer to 0 than that of the true ones: with few prompts per step the
    transfer counts little.

    Source: TAC (arXiv:2606.25178), which multiplies the mean absolute advantage; for the spread in its place
    see ``learnability``. The formula is that of public summaries: the paper's text was not at hand.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Learnability.Config):
        """Settings of ``tac``."""

        gradients_every: Count = 2
        """Steps between comparisons of the tasks' gradients."""
        alpha: NotNegative = 1.0
        """Weight of the transfer: 0 = ``learnability``."""

    per_task: ClassVar[tuple[str, ...]] = ("transfer", "squares", "compared")
    config: Config

    def _start(self) -> None:
        self.transfer = dict.fromkeys(self.tasks, 0.0)
        """Moving average of each task's mean cosine; ``squares``: of its square."""
        self.squares = dict.fromkeys(self.tasks, 0.0)
        self.compared = dict.fromkeys(self.tasks, 0.0)
        """Number of comparisons of each task."""

    def update(self, stats: Mapping[str, TaskStats], step: int) -> None:
        """See ``SchedulerPolicy``."""
        super().update(stats, step)
        for task in self.tasks:
            found = stats[task].metrics if task in stats else {}
            cosines = {o: found[f"cosine/{o}"] for o in self.tasks if f"cosine/{o}" in found}
            if not cosines:
                continue
            mass = math.fsum(self.prior[other] for other in cosines)
            value = math.fsum(self.prior[other] * cosine for other, cosine in cosines.items()) / mass
            self.compared[task] += 1.0
            gain = max(self.config.smoothing, 1.0 / self.compared[task])
            self.transfer[task] += gain * (value - self.transfer[task])
            self.squares[task] += gain * (value * value - self.squares[task])

    def transfer_error(self, task: str) -> float:
        """Return the standard error of the task's ``transfer``; one comparison of variance 1 is mixed in."""
        n, gain = self.compared[task], self.config.smoothing
        variance = max(0.0, self.squares[task] - self.transfer[task] ** 2)
        return math.sqrt((n * variance + 1.0) / (n + 1.0) * max(1.0 / n, gain / (2.0 - gain))) if n else 0.0

    def _preferences(self) -> dict[str, float]:
        alpha, scores, errors = self.config.alpha, dict[str, float](), dict[str, float]()
        for task in (task for task in self.tasks if self.traces[task].steps):
            spread, error = self.traces[task].spread
            factor = max(0.0, 1.0 + alpha * self.transfer[task])
            scores[task] = spread * factor
            errors[task] = math.hypot(factor * error, spread * alpha * self.transfer_error(task))
        values = softmax(self.clear(scores, errors), self.config.temperature) if scores else {}
        return {task: self.prior[task] * values.get(task, 0.0) for task in self.tasks}

    def _reason(self, task: str, trace: TaskTrace) -> str:
        return f"{super()._reason(task, trace)}, mean cosine with the other tasks {self.transfer[task]:+.2f}"
