"""Level, spread and progress of a task from its step statistics, smoothed, on one scale for all tasks.

A level in [0, 1] is the position of the mean reward within the reward's range: the declared range
(``reward_ranges``), else the observed range. If rewards exclude each other, their sum never reaches the sum
of the declared ends; the range is then that of rewards that applied together. Targets are levels.

Training prompts repeat and are memorised, sooner in tasks with more prompts, so the training reward
overstates the level. Evaluations correct the level by the difference between held-out and training reward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from multitask_rl.records import NUM_EXTREMES, Direction, TaskStats

REWARD_SCORE = "reward_score"
"""The ``metric_key`` that means the training reward."""

_SPREAD = 2.0
"""Without single rewards, mean -+ this many standard deviations stand for the extremes."""
_OFFSET_GAIN = 0.3
"""Gain of an evaluation; one evaluation of 256 prompts has a standard error of 0.03."""
_VARIANCE_GAIN = 0.02
_PRIOR_STEPS = 4
"""Weight, in steps, of the largest possible variance beside the measured variance."""


@dataclass(kw_only=True, slots=True)
class ShownRange:
    """Observed range of rewards: ``NUM_EXTREMES`` groups reach each end, so one outlier does not set it.

    ``lowest`` holds the smallest of the groups' lowest rewards, ascending; ``highest`` is its mirror image.
    """

    lowest: list[float] = field(default_factory=list)
    highest: list[float] = field(default_factory=list)

    def widen(self, lowest: Iterable[float], highest: Iterable[float]) -> None:
        """Add the lowest and the highest reward of each further group."""
        self.lowest = sorted([*self.lowest, *lowest])[:NUM_EXTREMES]
        self.highest = sorted([*self.highest, *highest], reverse=True)[:NUM_EXTREMES]

    @property
    def ends(self) -> tuple[float, float] | None:
        """Return ``low < high``; None until enough groups have shown different rewards."""
        if self.lowest and self.lowest[-1] < self.highest[-1]:
            return self.lowest[-1], self.highest[-1]
        return None


@dataclass(kw_only=True, slots=True)
class Average:
    """A moving average over a task's prompts, with its standard error; all fields are state."""

    value: float = 0.0
    weight: float = 0.0
    """Variance of the average, in units of the variance of one prompt."""
    variance: float = 0.0
    """Variance of one prompt, estimated from differences between steps."""
    steps: int = 0
    last: float = 0.0
    """Mean of the newest step."""
    last_prompts: int = 0

    def add(self, mean: float, num_prompts: int, gain: float) -> None:
        """Add the mean over ``num_prompts`` prompts of one step with weight ``gain``."""
        if self.steps:
            seen = (mean - self.last) ** 2 / (1.0 / num_prompts + 1.0 / self.last_prompts)
            self.variance += max(_VARIANCE_GAIN, 1.0 / self.steps) * (seen - self.variance)
        self.steps += 1
        self.last, self.last_prompts = mean, num_prompts
        self.value += gain * (mean - self.value)
        self.weight = (1.0 - gain) ** 2 * self.weight + gain * gain / num_prompts

    def error(self, width: float) -> float:
        """Return the standard error of ``value``; four steps of variance ``width^2 / 4`` are mixed in."""
        measured = min(max(0, self.steps - 1), 1.0 / _VARIANCE_GAIN)
        total = measured * self.variance + _PRIOR_STEPS * 0.25 * width * width
        return math.sqrt(self.weight * total / (measured + _PRIOR_STEPS))


@dataclass(kw_only=True, slots=True)
class TaskTrace:
    """The smoothed history of one task; all its fields but the first are state."""

    known_range: tuple[float, float] | None = None
    """Declared ``(low, high)`` of the reward."""
    steps: int = 0
    """Steps that gave a finite value; ``prompts`` counts their prompts."""
    prompts: int = 0
    seen: int = 0
    """Prompts of all steps, those without a finite value too."""
    raw: Average = field(default_factory=Average)
    """The watched value, unscaled: the scale is applied on reading, so a wider range rescales old values."""
    within: Average = field(default_factory=Average)
    """The standard deviation of the reward within groups, in the reward's unit."""
    above: Average = field(default_factory=Average)
    """The best reward of a group minus the mean of the others, in the reward's unit."""
    with_gradient: Average = field(default_factory=Average)
    """The share of learnable groups (``TaskStats.num_informative``)."""
    offset: float = 0.0
    """Held-out value minus training value, smoothed; below 0 when prompts were memorised."""
    offset_variance: float = 0.0
    """Variance of ``offset`` from the held-out prompts alone."""
    evaluations: int = 0
    """Number of held-out values in ``offset``."""
    applied: tuple[float, float] | None = None
    """Declared ends of the rewards of all slots so far, or of another metric; None before the first."""
    shown: ShownRange = field(default_factory=ShownRange)
    """Observed range of the rewards; empty when another metric is watched."""
    earned: ShownRange = field(default_factory=ShownRange)
    """Range of the rewards if another metric is watched: the declared one, else what was observed."""

    def observe(
        self, stats: TaskStats, metric_key: str, smoothing: float, prompts_averaged: int = 1
    ) -> float | None:
        """Add one step; return the change of the smoothed level, None without prompts or finite value.

        The gain for ``n`` prompts is ``min(smoothing, n / prompts_averaged)``, but at least ``n`` divided by
        the number of the task's prompts so far.
        """
        if stats.num_prompts <= 0:
            return None
        value, statistic = stats.metrics.get(metric_key, math.nan), stats.statistics.get(metric_key)
        if metric_key == REWARD_SCORE:
            value = stats.reward_mean + stats.shift
        elif statistic is not None and statistic.direction is Direction.lower:  # ``1 - x`` of a bad rate
            ends = statistic.low + statistic.high
            value = ends - value if math.isfinite(ends) else -value
        n = stats.num_prompts
        self.seen = max(self.seen, self.prompts) + n
        gain = max(min(smoothing, n / prompts_averaged), n / self.seen)
        self.with_gradient.add(stats.num_informative / n, n, gain)
        if not math.isfinite(value):
            return None
        has_spread = math.isfinite(stats.reward_std)
        std = max(0.0, stats.reward_std) if has_spread else 0.0
        before = self.raw.value
        self.steps += 1
        self.prompts += n
        applied = stats.reward_range
        if metric_key != REWARD_SCORE:
            is_bounded = statistic is not None and math.isfinite(statistic.high - statistic.low)
            applied = (statistic.low, statistic.high) if statistic is not None and is_bounded else None
        if applied is not None:
            known = self.applied or applied
            self.applied = min(known[0], applied[0]), max(known[1], applied[1])
        if metric_key == REWARD_SCORE:
            self.shown.widen(
                stats.lowest or [value - _SPREAD * std], stats.highest or [value + _SPREAD * std]
            )
        elif stats.reward_range is not None:
            low, high = stats.reward_range
            self.earned.widen([low] * NUM_EXTREMES, [high] * NUM_EXTREMES)
        else:
            self.earned.widen(stats.lowest, stats.highest)
        gain = max(min(smoothing, n / prompts_averaged), n / self.prompts)
        self.raw.add(value, n, gain)
        if has_spread:
            self.within.add(std, n, gain if self.within.steps else 1.0)
        if metric_key == REWARD_SCORE and math.isfinite(stats.headroom):
            self.above.add(stats.headroom, n, gain if self.above.steps else 1.0)
        change = place(self.raw.value, *self._scale) - place(before, *self._scale)
        return change if self.steps > 1 else 0.0

    def calibrate(self, held_out: float, error: float = 0.0) -> None:
        """Add a held-out value and its standard error; no effect before the first step."""
        if self.steps and math.isfinite(held_out):
            self.evaluations += 1
            gain = max(_OFFSET_GAIN, 1.0 / self.evaluations)
            self.offset += gain * (held_out - self.raw.value - self.offset)
            known = error if math.isfinite(error) else 0.0
            self.offset_variance = (1.0 - gain) ** 2 * self.offset_variance + (gain * known) ** 2

    @property
    def level(self) -> float:
        """Smoothed value, corrected by the evaluations, on the scale of levels, in [0, 1]."""
        return place(self.raw.value + self.offset, *self._scale)

    @property
    def level_error(self) -> float:
        """Standard error of ``level``, from training prompts and evaluations."""
        low, high = self._scale
        return math.hypot(self.raw.error(high - low), math.sqrt(self.offset_variance)) / (high - low)

    @property
    def spread(self) -> tuple[float, float]:
        """Smoothed spread of the reward within groups as a part of the reward's range, and its error.

        Before the first group of two it is ``sqrt(p (1 - p))`` of the level ``p``, as for a 0/1 reward.
        """
        low, high = self._scale
        if not self.within.steps:
            return math.sqrt(self.level * (1.0 - self.level)), self.level_error
        if not self.shown.lowest:  # the scale of another metric is not that of the rewards
            low, high = self.earned.ends or (0.0, 1.0)
        width = high - low
        return self.within.value / width, self.within.error(0.5 * width) / width

    @property
    def headroom(self) -> tuple[float, float]:
        """Distance from a group's best reward to the mean of the others, and its standard error.

        Smoothed, on the scale of levels; ``(1, 0)`` before the first group of two or more.
        """
        low, high = self._scale
        if not self.above.steps:
            return 1.0, 0.0
        return max(0.0, self.above.value) / (high - low), self.above.error(high - low) / (high - low)

    @property
    def informative(self) -> float:
        """Smoothed share of learnable groups, of steps without a finite value too; 1 before any step."""
        return self.with_gradient.value if self.with_gradient.steps else 1.0

    @property
    def _scale(self) -> tuple[float, float]:
        """Ends of the scale, ``low < high``."""
        # of a reward that declares no range, those that applied by chance say nothing
        if self.known_range is not None or not self.shown.lowest:
            low, high = self.applied or self.known_range or (0.0, 0.0)
            if low < high:
                return low, high
        # without ends: another metric that declares none, or rewards that have not differed yet
        return self.shown.ends or (min(0.0, self.raw.value), max(1.0, self.raw.value))

    @classmethod
    def from_state(cls, state: Mapping[str, Any], known_range: tuple[float, float] | None) -> TaskTrace:
        """Return the trace whose ``asdict`` is ``state``."""
        averages = {name: Average(**state[name]) for name in ("raw", "within", "above", "with_gradient")}
        applied = tuple(state["applied"]) if state["applied"] else None
        ranges = {name: ShownRange(**state.get(name, {})) for name in ("shown", "earned")}
        own = {**ranges, "applied": applied, "known_range": known_range}
        return cls(**{**state, **averages, **own})


def place(value: float, low: float, high: float) -> float:
    """Return where ``value`` lies between ``low`` and ``high``, clipped to [0, 1]."""
    return min(1.0, max(0.0, (value - low) / (high - low)))
