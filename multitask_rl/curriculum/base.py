"""What a scheduler policy is: statistics of each step in, a weight per task out, with its reasons.

A policy knows nothing of floors, quotas, frozen tasks or logs; ``scheduler.py`` owns those. State that
belongs to a task lives in dictionaries by task name, so that a resumed run may add, drop and rename tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from multitask_rl.curriculum.quotas import normalise
from multitask_rl.curriculum.signal import REWARD_SCORE, TaskSignal, TaskTrace
from multitask_rl.records import TaskStats

__all__ = ["SchedulerPolicy", "SchedulerPolicyConfig", "softmax"]


@dataclass(kw_only=True, slots=True)
class SchedulerPolicyConfig:
    """Settings that every policy has; a policy's ``Config`` extends it."""

    metric_key: str = REWARD_SCORE
    """``reward_score`` (mean training reward) or a key of ``TaskStats.metrics``; higher is better."""
    smoothing: float = 0.1
    """Gain of the moving averages per step, in (0, 1]."""
    prompts_averaged: int = 1
    """Prompts of a task, at least, over which its averages reach: a step with few of them counts for less."""

    def __post_init__(self) -> None:
        """Check ranges."""
        if not 0.0 < self.smoothing <= 1.0:
            raise ValueError(f"smoothing must be in (0, 1], got {self.smoothing!r}")
        if self.prompts_averaged < 1:
            raise ValueError(f"prompts_averaged must be at least 1, got {self.prompts_averaged!r}")


class SchedulerPolicy:
    """Base of all policies: built as ``Cls(Cls.Config(**policy_config), tasks, ...)``.

    Subclasses override ``_start``, ``_learn`` and ``_preferences``, list the attributes that hold a number
    per task in ``per_task`` (they are then saved, restored and renamed), and may override ``reasons``.

    Args:
        config: an instance of the policy's ``Config``.
        tasks: names, at least one; the order has no influence.
        initial_weights: prior importance per task, > 0; what ``weights`` returns before any statistics.
        targets: level in [0, 1] at which a task counts as learnt (missing = 1).
        reward_ranges: ``(low, high)`` of a task's reward where it is known (see ``signal.py``).
    """

    Config: ClassVar[type[SchedulerPolicyConfig]] = SchedulerPolicyConfig
    adaptive: ClassVar[bool] = True
    """Weights follow the statistics; only then is a task that cannot be learnt held at its floor."""
    mixes_floor: ClassVar[bool] = True
    """How floors are met: a mixture ``m_k + (1 - sum m) w_k`` (True), or by raising only what is below
    (False: weights given by a person stay as given)."""
    per_task: ClassVar[tuple[str, ...]] = ()
    """Attributes ``dict[str, float]`` that are part of the state."""

    def __init__(
        self,
        config: SchedulerPolicyConfig,
        tasks: Sequence[str],
        initial_weights: Mapping[str, float],
        targets: Mapping[str, float],
        reward_ranges: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        self.config = config
        self.tasks = tuple(tasks)
        self.prior = normalise({task: initial_weights[task] for task in tasks})
        self.targets = {task: targets.get(task, 1.0) for task in tasks}
        self.ranges = dict(reward_ranges or {})
        self.traces = {task: TaskTrace() for task in tasks}
        self._start()

    def _start(self) -> None:
        """Create own state; tasks, targets and prior are known."""

    def update(self, stats: Mapping[str, TaskStats], step: int) -> None:
        """Learn from one step. Tasks without prompts or without a finite value keep what they had."""
        signals: dict[str, TaskSignal] = {}
        for task in self.tasks:
            if task in stats:
                signal = self.traces[task].observe(
                    stats[task],
                    metric_key=self.config.metric_key,
                    smoothing=self.config.smoothing,
                    known_range=self.ranges.get(task),
                    prompts_averaged=self.config.prompts_averaged,
                )
                if signal is not None:
                    signals[task] = signal
        if signals:
            self._learn(signals, step)

    def calibrate(self, held_out: Mapping[str, float]) -> None:
        """Correct the levels by the mean rewards on held-out prompts, if rewards are what is watched."""
        if self.config.metric_key == REWARD_SCORE:
            for task in self.tasks:
                if task in held_out:
                    self.traces[task].calibrate(held_out[task])

    def weights(self) -> dict[str, float]:
        """Return the share per task, sum 1; a task that has given no value yet keeps its prior share."""
        seen = {task for task in self.tasks if self.traces[task].steps}
        preferences = {task: p for task, p in self._preferences().items() if task in seen}
        total = math.fsum(preferences.values())
        if not total > 0.0:  # nothing seen, or nothing left to prefer (every task at its target)
            return dict(self.prior)
        mass = math.fsum(self.prior[task] for task in seen)
        return normalise(
            {t: mass * preferences[t] / total if t in seen else self.prior[t] for t in self.tasks}
        )

    def reasons(self) -> dict[str, str]:
        """Return why each task's weight is what it is, a few words with numbers."""
        return {
            task: f"level {self.level(task):.2f} of target {self.targets[task]:.2f}, "
            f"{self.informative(task):.0%} of its groups informative"
            for task in self.tasks
        }

    def level(self, task: str) -> float:
        """Return the task's smoothed level in [0, 1]."""
        return self.traces[task].level(self.ranges.get(task))

    def informative(self, task: str) -> float:
        """Return the smoothed share of the task's groups that gave a gradient."""
        return self.traces[task].informative

    def deficit(self, task: str) -> float:
        """Return how far the task's level is below its target, >= 0."""
        return max(0.0, self.targets[task] - self.level(task))

    def _learn(self, signals: Mapping[str, TaskSignal], step: int) -> None:
        """Update own state; levels and informative shares are already up to date."""

    def _preferences(self) -> dict[str, float]:
        """Return a number >= 0 per task; ``weights`` normalises them."""
        return dict(self.prior)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {
            "traces": {task: trace.state_dict() for task, trace in self.traces.items()},
            "per_task": {name: dict(getattr(self, name)) for name in self.per_task},
        }

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> None:
        """Restore ``state_dict``; tasks it does not know stay fresh, tasks that are gone are dropped.

        Args:
            state: what ``state_dict`` returned, perhaps of a run with other tasks.
            renamed: old name -> new name.
        """
        names = renamed or {}
        for old, saved in state["traces"].items():
            if (task := names.get(old, old)) in self.traces:
                self.traces[task] = TaskTrace.from_state(saved)
        for name in self.per_task:
            values: dict[str, float] = getattr(self, name)
            for old, value in state["per_task"].get(name, {}).items():
                if (task := names.get(old, old)) in values:
                    values[task] = value


def softmax(logits: Mapping[str, float], temperature: float = 1.0) -> dict[str, float]:
    """Return ``exp(x_k / temperature)`` normalised to sum 1.

    >>> softmax({"a": 0.0, "b": 0.0})
    {'a': 0.5, 'b': 0.5}
    """
    top = max(logits.values())
    return normalise({task: math.exp((x - top) / temperature) for task, x in logits.items()})
