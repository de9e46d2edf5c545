"""Statistics of the last training steps per task: groups with a gradient, rewards, length, entropy, KL."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, variance
from typing import Any

from multitask_rl.records import TaskStats

__all__ = ["StepHistory"]

_MIN_STEPS_FOR_TREND = 9
_RISING_Z = 2.0
_METRICS = ("length", "entropy", "kl")
"""Keys of ``TaskStats.metrics`` that are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    step: int
    updates: float
    """Groups that gave a gradient."""
    prompts: float
    """Groups scored."""
    reward: float
    length: float
    entropy: float
    kl: float


class StepHistory:
    """The last ``max_steps`` steps of every task."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._entries: dict[str, deque[_Entry]] = {}

    def record(self, step: int, stats: Mapping[str, TaskStats]) -> None:
        """Add the step that started from the weights of ``step``."""
        for task, seen in stats.items():
            entry = _Entry(
                step=step,
                updates=float(seen.num_informative),
                prompts=float(seen.num_prompts),
                reward=seen.reward_mean,
                **{name: seen.metrics.get(name, math.nan) for name in _METRICS},
            )
            self._entries.setdefault(task, deque(maxlen=self._max_steps)).append(entry)

    def find_culprit(self, victim: str, since: int) -> str:
        """Return the likely cause of the fall of ``victim`` in the steps from ``since`` on; empty = unknown.

        It is the victim itself if its training reward rose meanwhile: its reward is then hacked, flipped or
        corrupt. Otherwise it is the other task with the most groups with a gradient, or the victim if no
        other task had any. This is an attribution, not a proof.
        """
        if self._is_rising(victim, since):
            return victim
        updates = {
            task: math.fsum(entry.updates for entry in entries if entry.step >= since)
            for task, entries in self._entries.items()
        }
        others = {task: n for task, n in updates.items() if task != victim and n > 0.0} or {
            task: n for task, n in updates.items() if n > 0.0
        }
        return max(others, key=lambda task: (others[task], task)) if others else ""

    def _is_rising(self, task: str, since: int) -> bool:
        """Whether the last third of the rewards lies above the first third by two standard errors."""
        rewards = [
            e.reward for e in self._entries.get(task, ()) if e.step > since and math.isfinite(e.reward)
        ]
        if len(rewards) < _MIN_STEPS_FOR_TREND:
            return False
        third = len(rewards) // 3
        first, last = rewards[:third], rewards[-third:]
        error = math.sqrt((variance(first) + variance(last)) / third)
        return fmean(last) - fmean(first) > _RISING_Z * error

    def mean_since(self, task: str, name: str, since: int) -> float:
        """Return the mean of ``name`` over the steps from ``since`` on; NaN if unknown.

        ``name`` is ``reward``, ``length``, ``entropy``, ``kl`` or ``prompts`` (per step).
        """
        entries = [entry for entry in self._entries.get(task, ()) if entry.step >= since]
        values = [v for entry in entries if math.isfinite(v := getattr(entry, name))]
        return fmean(values) if values else math.nan

    def rewind(self, step: int) -> None:
        """Drop the steps after the weights of ``step``: a rollback has undone them."""
        for task, entries in self._entries.items():
            kept = (entry for entry in entries if entry.step < step)
            self._entries[task] = deque(kept, maxlen=self._max_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able (a value that is not finite is None)."""
        return {
            task: [{k: v if math.isfinite(v) else None for k, v in asdict(e).items()} for e in entries]
            for task, entries in self._entries.items()
        }

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
        """Restore ``state_dict``."""
        self._entries = {}
        for task, saved in state.items():
            known: list[dict[str, Any]] = [
                {k: math.nan if v is None else v for k, v in entry.items()} for entry in saved
            ]
            entries = (_Entry(**entry) for entry in known)
            self._entries[renamed.get(task, task)] = deque(entries, maxlen=self._max_steps)
