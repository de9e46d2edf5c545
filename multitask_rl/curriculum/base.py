"""Base of scheduler policies: from the statistics of each step to a weight and a reason per task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any, ClassVar

from multitask_rl.boundary.printable import counted
from multitask_rl.config.schema.ranges import Count, Natural, PositiveFraction, Settings
from multitask_rl.curriculum.quotas import normalise
from multitask_rl.curriculum.signal import REWARD_SCORE, TaskTrace
from multitask_rl.errors import PluginError
from multitask_rl.records import TaskStats, rename_tasks

NOISE = 2.0
"""A difference between tasks, or a change, counts only beyond this many standard errors."""


@dataclass(kw_only=True, slots=True)
class SchedulerPolicyConfig(Settings):
    """Settings that every policy has; a policy's ``Config`` extends it."""

    metric_key: str = field(default=REWARD_SCORE, metadata={"derived": True})
    """``scheduler.metric_key``; a metric with a direction is turned so that higher is better."""
    smoothing: PositiveFraction = 0.1
    """Gain of the moving averages per step."""
    prompts_averaged: Count = 1
    """Fewest prompts that a task's averages span: a step with few prompts gets a smaller gain."""
    prior_prompts: Natural = 20
    """Evidence of the initial weights, in prompts: after this many prompts of a task, its share has moved at
    most half of the way from its initial weight to the policy's preference."""
    gradients_every: Natural = 0
    """Steps between comparisons of the tasks' gradients, which add ``grad_norm`` and ``cosine/<other task>``
    to a task's metrics; 0 = never."""


class SchedulerPolicy:
    """Base of all policies: built as ``Cls(Cls.Config(**policy_config), tasks, ...)``.

    Subclasses override ``_start``, ``_learn`` and ``_preferences``, list the attributes that hold a number
    per task in ``per_task`` (they are then saved, restored and renamed), and may override ``_reason``.

    Args:
        config: an instance of the policy's ``Config``.
        tasks: names, at least one; the order has no influence.
        initial_weights: prior weight per task, > 0; ``weights`` starts from it, normalised.
        targets: level in [0, 1] at which a task counts as learnt (missing = 1).
        reward_ranges: known ``(low, high)`` of a task's reward (see ``signal.py``).
    """

    Config: ClassVar[type[SchedulerPolicyConfig]] = SchedulerPolicyConfig
    adaptive: ClassVar[bool] = True
    """Weights follow the statistics. Only adaptive policies let the gate hold a task at its floor."""
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
        # the ranges are of the reward; another metric has its own scale
        self.ranges = dict(reward_ranges or {}) if config.metric_key == REWARD_SCORE else {}
        self.traces = {task: TaskTrace(known_range=self.ranges.get(task)) for task in tasks}
        self._start()

    def _start(self) -> None:
        """Create the policy's own state; ``tasks``, ``targets`` and ``prior`` are set."""

    def update(self, stats: Mapping[str, TaskStats], step: int) -> None:
        """Update from the statistics of one step.

        A task without prompts stays as it is. Without a finite value a task keeps its level; its share of
        informative groups moves.
        """
        own, progress = self.config, dict[str, float]()
        for task, trace in self.traces.items():
            if task in stats:
                change = trace.observe(stats[task], own.metric_key, own.smoothing, own.prompts_averaged)
                if change is not None:
                    progress[task] = change
        if progress:
            self._learn(progress)

    def calibrate(self, held_out: Mapping[str, float], errors: Mapping[str, float] | None = None) -> None:
        """Correct the levels by mean held-out rewards; no effect when ``metric_key`` is another metric."""
        if self.config.metric_key == REWARD_SCORE:
            for task, trace in self.traces.items():
                if task in held_out:
                    trace.calibrate(held_out[task], (errors or {}).get(task, 0.0))

    def weights(self) -> dict[str, float]:
        """Return the share per task, sum 1: the prior, moved towards the preferences by the certainty.

        ``share_k = prior_k + c_k (r_k - prior_k)`` with ``r`` the normalised preferences and ``c_k`` the
        ``certainty``. Gains and losses must balance: the larger sum is scaled down to the smaller.

        Raises:
            PluginError: the preferences are no mapping, or one of a task that was seen is missing, negative
                or not finite.
        """
        seen = [task for task in self.tasks if self.traces[task].steps]
        preferences = self._preferences()
        what = f"scheduler.policy: {type(self).__name__}._preferences"
        if not isinstance(preferences, Mapping):
            raise PluginError(
                f"{what} returned {preferences!r:.200}; expected a mapping of tasks to numbers >= 0"
            )
        told: dict[str, object] = {task: preferences.get(task) for task in seen}
        wrong = {t: v for t, v in told.items() if not (isinstance(v, Real) and 0.0 <= float(v) < math.inf)}
        if wrong:
            raise PluginError(f"{what} gives {wrong}; allowed: a finite number >= 0 for each task")
        total = math.fsum(preferences[task] for task in seen)
        if not total > 0.0:  # no task seen yet, or every task at its target
            return dict(self.prior)
        mass = math.fsum(self.prior[task] for task in seen)
        moves = {t: self.certainty(t) * (mass * preferences[t] / total - self.prior[t]) for t in seen}
        gained = math.fsum(move for move in moves.values() if move > 0.0)
        given = -math.fsum(move for move in moves.values() if move < 0.0)
        moved = min(gained, given)
        if not moved > 0.0:
            return dict(self.prior)
        moves = {task: move * (moved / (gained if move > 0.0 else given)) for task, move in moves.items()}
        return normalise({task: self.prior[task] + moves.get(task, 0.0) for task in self.tasks})

    def certainty(self, task: str) -> float:
        """Return ``n / (n + prior_prompts)`` after ``n`` prompts of the task: how far its share may move."""
        prompts = self.traces[task].prompts
        return prompts / (prompts + self.config.prior_prompts) if prompts else 0.0

    def clear(self, values: Mapping[str, float], errors: Mapping[str, float]) -> dict[str, float]:
        """Return ``values`` without the differences that noise may explain: shrunk towards their mean.

        ``v_k -> m + (v_k - m) * max(0, 1 - (2 e_k / (v_k - m))^2)``, with ``m`` the mean weighted by
        prior and certainty and ``e_k`` the standard error of ``v_k - m``: values within two standard errors
        of the mean become the mean, at four they keep three quarters of their distance.
        """
        q = normalise({task: self.prior[task] * self.certainty(task) for task in values})
        mean = math.fsum(q[task] * value for task, value in values.items())
        pooled = math.fsum((q[task] * errors[task]) ** 2 for task in values)
        cleared = {}
        for task, value in values.items():
            variance = pooled + (1.0 - 2.0 * q[task]) * errors[task] ** 2
            distance, noise = value - mean, NOISE * NOISE * max(0.0, variance)
            is_clear = distance * distance > noise
            cleared[task] = mean + distance * (1.0 - noise / distance**2) if is_clear else mean
        return cleared

    def reasons(self) -> dict[str, str]:
        """Return the reason for each task's weight: a few words with numbers."""
        return {task: self._reason(task, self.traces[task]) for task in self.tasks}

    def _reason(self, task: str, trace: TaskTrace) -> str:
        return (
            f"level {trace.level:.2f} +- {trace.level_error:.2f} of target {self.targets[task]:.2f} after "
            f"{counted(trace.prompts, 'prompt')}, {trace.informative:.0%} of its groups informative"
        )

    def deficit(self, task: str) -> float:
        """Return how far the task's level is below its target, >= 0."""
        return max(0.0, self.targets[task] - self.traces[task].level)

    def _learn(self, progress: Mapping[str, float]) -> None:
        """Update the policy's own state by the change of the smoothed level of each task that had prompts."""

    def _preferences(self) -> dict[str, float]:
        """Return a preference >= 0 per task; ``weights`` normalises them.

        Tasks with equal statistics get preferences in proportion to their priors.
        """
        return dict(self.prior)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {
            "traces": {task: asdict(trace) for task, trace in self.traces.items()},
            "per_task": {name: dict(getattr(self, name)) for name in self.per_task},
        }

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> None:
        """Restore ``state_dict``. Tasks missing in it start fresh; state of removed tasks is dropped."""
        self.traces = {task: TaskTrace(known_range=self.ranges.get(task)) for task in self.tasks}
        self._start()
        for task, saved in rename_tasks(state["traces"], renamed, self.tasks).items():
            self.traces[task] = TaskTrace.from_state(saved, self.ranges.get(task))
        for name in self.per_task:
            values: dict[str, float] = getattr(self, name)
            values.update(rename_tasks(state["per_task"].get(name, {}), renamed, values))


def softmax(logits: Mapping[str, float], temperature: float = 1.0) -> dict[str, float]:
    """Return ``exp(x_k / temperature)`` normalised to sum 1."""
    top = max(logits.values())
    return normalise({task: math.exp((x - top) / temperature) for task, x in logits.items()})
