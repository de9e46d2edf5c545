"""One watched metric: which number it is, which way is up, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Any

from multitask_rl.config.build import suggest
from multitask_rl.guard.detector import DetectorSettings, RegressionDetector
from multitask_rl.records import Event, TaskEvaluation

__all__ = ["Watch"]

_MIN_UNIT_VARIANCE = 0.02
"""Per prompt: near 0 and 1 the sample variance is itself too noisy to divide by."""
_MIN_VARIANCE = 1e-12


@dataclass(kw_only=True, slots=True)
class Watch:
    """A metric of a task with its detector. All values inside are oriented: higher is better."""

    task: str
    metric: str = ""
    """Key of ``TaskEvaluation.metrics``; empty = the primary metric, which has a value per prompt."""
    higher_is_better: bool = True
    detector: RegressionDetector = field(default_factory=RegressionDetector)
    is_unit: bool | None = None
    """Values lie in [0, 1], as the first evaluation says; None before it."""

    @property
    def key(self) -> str:
        """``task`` or ``task/metric``."""
        return f"{self.task}/{self.metric}" if self.metric else self.task

    def observe(self, evaluation: TaskEvaluation, settings: DetectorSettings) -> bool:
        """Add an evaluation; False when it holds no finite value of the metric.

        A rate that should fall is watched as its complement ``1 - x``: 15 % of a violation rate of 0.02 is
        nothing, 15 % of the 98 % that comply is what matters.
        """
        values = [v for v in evaluation.values if math.isfinite(v)]
        if self.metric:
            mean = evaluation.metrics.get(self.metric, math.nan)
            values = [mean] if math.isfinite(mean) else []
        if not values:
            return False
        if self.is_unit is None:
            self.is_unit = all(0.0 <= v <= 1.0 for v in values)
        value = self.orient(fmean(values))
        num_prompts = max(1, len(evaluation.values))
        if self.metric:
            spread = self._spread_of_mean(value, num_prompts)
        else:
            spread = variance(values) if len(values) > 1 else 0.0
            num_prompts = len(values)
        floor = _MIN_UNIT_VARIANCE if self.is_unit else _MIN_VARIANCE
        error = math.sqrt(max(spread, floor) / num_prompts)
        scale = 0.0 if self.is_unit else math.sqrt(spread)
        self.detector.observe(value, error, evaluation.step, settings, scale=scale)
        return True

    def tell_missing(self, step: int, evaluation: TaskEvaluation | None) -> Event:
        """Say that there is no value; an alarm if there never was one."""
        kind, reason = "warn", f"{self.key} has no value at step {step}: these weights are not judged good"
        if not self.detector.count:
            known = evaluation.metrics if evaluation is not None and self.metric else ()
            kind, reason = "alarm", f"{self.key} has had no value up to step {step}: nothing guards it"
            reason += suggest(self.metric, known)
        return Event(step=step, source="guard", kind=kind, reason=reason, task=self.task)

    def orient(self, value: float) -> float:
        """Return ``value`` such that higher is better."""
        if self.higher_is_better:
            return value
        return 1.0 - value if self.is_unit else -value

    def _spread_of_mean(self, value: float, num_prompts: int) -> float:
        """Return a variance per prompt for a metric of which only the mean is known."""
        if self.is_unit:
            return value * (1.0 - value)
        step = value - self.detector.value if self.detector.count else 0.0
        # Half the mean squared successive difference estimates the variance of the mean, whatever the trend.
        return num_prompts * 0.5 * step * step

    def has_reference(self, settings: DetectorSettings, min_reference: float) -> bool:
        """Whether there is a level to fall from: past the warm-up, and not next to zero."""
        reference = self.detector.reference
        if reference is None or self.detector.count <= settings.warmup:
            return False
        return settings.absolute or not self.is_unit or reference >= min_reference

    def statistics(self, settings: DetectorSettings) -> dict[str, float]:
        """Return the numbers behind a decision, in oriented units."""
        d = self.detector
        reference = d.value if d.reference is None else d.reference
        return {
            "value": d.value,
            "error": d.error,
            "reference": reference,
            "drop": reference - d.value,
            "relevant_drop": d.relevant_drop(settings),
            "cusum": d.cusum,
            "cusum_limit": d.limit(settings),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {"is_unit": self.is_unit, "detector": self.detector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self.is_unit = state["is_unit"]
        self.detector = RegressionDetector.from_state(state["detector"])


def build_watches(
    entries: Sequence[str], tasks: Mapping[str, bool], lower_is_better: Sequence[str]
) -> list[Watch]:
    """Return a watch per entry (``task`` or ``task/metric``); without any, one per task."""
    watches = []
    for entry in entries or list(tasks):
        task, _, metric = entry.partition("/")
        higher = tasks[task] if not metric else metric not in lower_is_better
        watches.append(Watch(task=task, metric=metric, higher_is_better=higher))
    return watches
