"""Equal weights for the whole run: the baseline that every other policy has to beat."""

from __future__ import annotations

from typing import ClassVar

from multitask_rl.curriculum.base import SchedulerPolicy

__all__ = ["Uniform"]


class Uniform(SchedulerPolicy):
    """Give every task the same share. Initial weights are ignored; use ``static`` to keep them."""

    adaptive: ClassVar[bool] = False

    def weights(self) -> dict[str, float]:
        """Return equal shares."""
        return {task: 1.0 / len(self.tasks) for task in self.tasks}

    def reasons(self) -> dict[str, str]:
        """Return the same reason for every task."""
        return dict.fromkeys(self.tasks, "equal shares")
