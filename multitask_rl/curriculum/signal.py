"""What a step's statistics say about a task, smoothed and on one scale for all tasks.

Weights compare tasks, so their levels must be comparable. A reward in [0, 1] is its own level. Any other is
placed within its range: the range given (``reward_ranges``), else the range the run has *demonstrated*, from
the lowest ``mean - 2 std`` to the highest ``mean + 2 std`` of a step (std: mean deviation within groups). The
level of a task is then where its mean lies among the responses it has been seen to give; it moves to 1 as
the policy comes to give its best responses always. Targets are levels.

Training prompts come again and are learnt by heart, the sooner the more prompts a task gets: by its training
reward, the task that is pushed most looks better than it is. Evaluations correct the level by the difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from multitask_rl.records import TaskStats

__all__ = ["REWARD_SCORE", "TaskSignal", "TaskTrace"]

REWARD_SCORE = "reward_score"
"""The ``metric_key`` that means the training reward."""

_SPREAD = 2.0
_UNIT_SLACK = 1e-9
_OFFSET_GAIN = 0.3
"""Of an evaluation: a single one of 256 prompts has a standard error of 0.03."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSignal:
    """What one step added about one task."""

    level: float
    """This step's value on the scale of levels, unsmoothed."""
    spread: float
    """Mean standard deviation of the reward within groups, on the scale of levels (in the reward's unit when
    another metric is watched): sqrt(p (1 - p)) for a 0/1 reward on prompts solved with probability p."""
    informative: float
    """Share of the step's groups that gave a gradient."""
    progress: float
    """Change of the smoothed level over the step; 0 for the first."""


@dataclass(kw_only=True, slots=True)
class TaskTrace:
    """The smoothed history of one task; all its fields are the state of a checkpoint."""

    steps: int = 0
    """Steps that gave a finite value."""
    prompts: int = 0
    """Prompts of those steps."""
    value: float = 0.0
    """Moving average of the raw value; the scale is applied when read, so that a wider range moves old
    and new alike."""
    informative: float = 1.0
    """Moving average of the share of groups with a gradient."""
    offset: float = 0.0
    """Held-out value less the training's, smoothed; below 0 when prompts were learnt by heart."""
    evaluations: int = 0
    """Held-out values that made it."""
    low: float = math.inf
    high: float = -math.inf
    """Demonstrated range of the raw value."""
    outside_unit: bool = False
    """A value outside [0, 1] was seen: the demonstrated range is the scale from then on."""

    def observe(
        self,
        stats: TaskStats,
        *,
        metric_key: str,
        smoothing: float,
        known_range: tuple[float, float] | None,
        prompts_averaged: int = 1,
    ) -> TaskSignal | None:
        """Add one step and return what it said; None when it says nothing (no prompts, no finite value).

        The gain of the moving averages is ``min(smoothing, n / prompts_averaged)`` for a step with ``n``
        prompts of the task; a plain mean over the prompts at first.
        """
        value = stats.reward_mean if metric_key == REWARD_SCORE else stats.metrics.get(metric_key, math.nan)
        if stats.num_prompts <= 0 or not math.isfinite(value):
            return None
        watches_reward = metric_key == REWARD_SCORE
        std = stats.reward_std if watches_reward and math.isfinite(stats.reward_std) else 0.0
        before = self.value
        self.steps += 1
        self.prompts += stats.num_prompts
        self.low = min(self.low, value - _SPREAD * std)
        self.high = max(self.high, value + _SPREAD * std)
        self.outside_unit |= not -_UNIT_SLACK <= value <= 1.0 + _UNIT_SLACK
        gain = min(smoothing, stats.num_prompts / prompts_averaged)
        gain = max(gain, stats.num_prompts / self.prompts)
        self.value += gain * (value - self.value)
        informative = stats.num_informative / stats.num_prompts
        self.informative += gain * (informative - self.informative)
        low, high = self._scale(known_range)
        width = high - low if watches_reward and high > low else 1.0
        return TaskSignal(
            level=_place(value, low, high),
            spread=max(0.0, stats.reward_std) / width if math.isfinite(stats.reward_std) else 0.0,
            informative=informative,
            progress=_place(self.value, low, high) - _place(before, low, high) if self.steps > 1 else 0.0,
        )

    def calibrate(self, held_out: float) -> None:
        """Note what the held-out prompts say at this time; nothing before the first step."""
        if self.steps and math.isfinite(held_out):
            self.evaluations += 1
            gain = max(_OFFSET_GAIN, 1.0 / self.evaluations)
            self.offset += gain * (held_out - self.value - self.offset)

    def level(self, known_range: tuple[float, float] | None) -> float:
        """Return the smoothed value, corrected by the evaluations, on the scale of levels, in [0, 1]."""
        return _place(self.value + self.offset, *self._scale(known_range))

    def _scale(self, known_range: tuple[float, float] | None) -> tuple[float, float]:
        if known_range is not None:
            return known_range
        return (self.low, self.high) if self.outside_unit else (0.0, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the fields, JSON-able (a range not yet seen is None)."""
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        if not self.steps:
            state["low"] = state["high"] = None
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TaskTrace:
        """Return the trace that ``state_dict`` described."""
        low, high = state["low"], state["high"]
        seen = {"low": math.inf if low is None else low, "high": -math.inf if high is None else high}
        return cls(**{**state, **seen})


def _place(value: float, low: float, high: float) -> float:
    """Return where ``value`` lies between ``low`` and ``high``, clipped to [0, 1]; 0.5 of an empty range."""
    if not high > low:
        return 0.5
    return min(1.0, max(0.0, (value - low) / (high - low)))
