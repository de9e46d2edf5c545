"""The initial weights, kept: what a person chose or tuned."""

from __future__ import annotations

from typing import ClassVar

from multitask_rl.curriculum.base import SchedulerPolicy

__all__ = ["Static"]


class Static(SchedulerPolicy):
    """Keep the initial weights for the whole run; only what is below its floor is raised to it."""

    adaptive: ClassVar[bool] = False

    def weights(self) -> dict[str, float]:
        """Return the initial weights."""
        return dict(self.prior)

    def reasons(self) -> dict[str, str]:
        """Return the same words for every task."""
        return dict.fromkeys(self.tasks, "initial weight, kept")
