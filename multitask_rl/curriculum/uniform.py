"""Equal weights for the whole run: the baseline of every other policy."""

from __future__ import annotations

from multitask_rl.curriculum.signal import TaskTrace
from multitask_rl.curriculum.static import Static


class Uniform(Static):
    """Give every task the same share. Initial weights are ignored; use ``static`` to keep them."""

    def weights(self) -> dict[str, float]:
        """Return equal shares."""
        return {task: 1.0 / len(self.tasks) for task in self.tasks}

    def _reason(self, task: str, trace: TaskTrace) -> str:
        return "equal shares"
