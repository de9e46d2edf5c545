"""Fixed weights: the initial weights for the whole run."""

from __future__ import annotations

from typing import ClassVar

from multitask_rl.curriculum.base import SchedulerPolicy
from multitask_rl.curriculum.signal import TaskTrace


class Static(SchedulerPolicy):
    """Keep the initial weights for the whole run; a share below its floor is raised to the floor."""

    adaptive: ClassVar[bool] = False

    def weights(self) -> dict[str, float]:
        """Return the initial weights."""
        return dict(self.prior)

    def _reason(self, task: str, trace: TaskTrace) -> str:
        return "initial weight, kept"
