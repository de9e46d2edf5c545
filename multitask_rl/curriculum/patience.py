"""Weights move only when a task has stopped improving for ``patience`` steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from multitask_rl.config.schema.ranges import Count, NotNegative, Range
from multitask_rl.curriculum.base import SchedulerPolicy, SchedulerPolicyConfig
from multitask_rl.curriculum.signal import TaskTrace


class Patience(SchedulerPolicy):
    """Change the weight of a task whose level has stopped rising (a plateau).

    At the target the weight is lowered. Below the target it is raised: a hard task may be stuck.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SchedulerPolicyConfig):
        """Settings of ``patience``."""

        patience: Count = 50
        """Steps without improvement that make a plateau."""
        min_delta: NotNegative = 0.01
        """The smoothed level improves if it is more than this above its best. 0: by any rise."""
        factor: Annotated[float, Range("(0, 1)")] = 0.7
        """A plateau at the target multiplies the weight by this; a plateau below the target divides it."""
        max_change: Annotated[float, Range("(1, inf)")] = 10.0
        """Bound of a weight relative to its initial value, both ways."""
        literal: bool = False
        """Lower the weight at every plateau, at any level. A negative control: it starves hard tasks."""

    per_task: ClassVar[tuple[str, ...]] = ("scale", "best", "waited")
    config: Config

    def _start(self) -> None:
        self.scale = dict.fromkeys(self.tasks, 1.0)
        """Factor on the task's initial weight."""
        self.best = dict.fromkeys(self.tasks, -1.0)
        """Best smoothed level so far."""
        self.waited = dict.fromkeys(self.tasks, 0.0)
        """Steps since the best level rose or the weight last changed."""

    def _learn(self, progress: Mapping[str, float]) -> None:
        for task in progress:
            level = self.traces[task].level
            if level > self.best[task] + self.config.min_delta:
                self.best[task], self.waited[task] = level, 0
                continue
            self.waited[task] += 1
            if self.waited[task] >= self.config.patience:
                self.waited[task] = 0
                bound, factor = self.config.max_change, self.config.factor
                is_lowered = self.config.literal or self.deficit(task) == 0.0
                scale = self.scale[task] * (factor if is_lowered else 1.0 / factor)
                self.scale[task] = min(bound, max(1.0 / bound, scale))

    def _preferences(self) -> dict[str, float]:
        return {task: self.prior[task] * self.scale[task] for task in self.tasks}

    def _reason(self, task: str, trace: TaskTrace) -> str:
        return (
            f"level {trace.level:.2f} of target {self.targets[task]:.2f}, best {self.best[task]:.2f}, "
            f"{self.waited[task]:.0f} of {self.config.patience} steps without a rise"
        )
