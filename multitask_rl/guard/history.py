"""Statistics of the last training steps per task: groups with a gradient, rewards, length, entropy, KL."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import fmean, variance
from typing import Any

from multitask_rl.records import TaskStats, rename_tasks

_MIN_STEPS_FOR_TREND = 9
_RISING_Z = 2.0
_METRICS = ("length", "entropy", "kl")
"""Keys of ``TaskStats.metrics`` that are kept."""


class StepHistory:
    """The last ``max_steps`` steps of every task, each a dictionary of numbers; NaN = not known.

    ``updates`` counts groups that gave a gradient, ``prompts`` groups that were scored.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._steps: dict[str, deque[dict[str, float]]] = {}

    def record(self, step: int, stats: Mapping[str, TaskStats]) -> None:
        """Add the step that started from the weights of ``step``."""
        for task, seen in stats.items():
            entry = {
                "step": step,
                "updates": float(seen.num_informative),
                "prompts": float(seen.num_prompts),
                "reward": seen.reward_mean,
                **{name: seen.metrics.get(name, math.nan) for name in _METRICS},
            }
            self._steps.setdefault(task, deque(maxlen=self._max_steps)).append(entry)

    def find_culprit(self, victim: str, since: int) -> str:
        """Return the likely cause of the fall of ``victim`` in the steps from ``since`` on; empty = unknown.

        It is the victim itself if its training reward rose meanwhile (the last third of its rewards lies
        above the first by two standard errors): its reward is then hacked, flipped or corrupt. Otherwise it
        is the other task with the most groups with a gradient, or the victim if no other task had any.
        """
        steps = [entry for entry in self._steps.get(victim, ()) if entry["step"] > since]
        rewards = [entry["reward"] for entry in steps if math.isfinite(entry["reward"])]
        if len(rewards) >= _MIN_STEPS_FOR_TREND:
            third = len(rewards) // 3
            first, last = rewards[:third], rewards[-third:]
            error = math.sqrt((variance(first) + variance(last)) / third)
            if fmean(last) - fmean(first) > _RISING_Z * error:
                return victim
        updates = {
            task: math.fsum(entry["updates"] for entry in entries if entry["step"] >= since)
            for task, entries in self._steps.items()
        }
        trained = {task: number for task, number in updates.items() if number > 0.0}
        candidates = [task for task in trained if task != victim] or list(trained)
        return max(candidates, key=lambda task: (trained[task], task), default="")

    def means_since(self, task: str, since: int) -> dict[str, float]:
        """Return the means of ``reward``, ``prompts`` and ``_METRICS`` since a step; NaN = unknown."""
        entries = [entry for entry in self._steps.get(task, ()) if entry["step"] >= since]
        means = {}
        for name in ("reward", "prompts", *_METRICS):
            known = [entry[name] for entry in entries if math.isfinite(entry[name])]
            means[name] = fmean(known) if known else math.nan
        return means

    def rewind(self, step: int) -> None:
        """Drop the steps after the weights of ``step``: a rollback has undone them."""
        for task, entries in self._steps.items():
            kept = (entry for entry in entries if entry["step"] < step)
            self._steps[task] = deque(kept, maxlen=self._max_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {task: list(entries) for task, entries in self._steps.items()}

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None) -> None:
        """Restore ``state_dict``."""
        steps = rename_tasks(state, renamed)
        self._steps = {task: deque(entries, maxlen=self._max_steps) for task, entries in steps.items()}
