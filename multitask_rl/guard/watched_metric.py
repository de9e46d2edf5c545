"""One watched metric: which number it is, which way is up, and its standard error."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from multitask_rl.config.schema.build import suggest
from multitask_rl.errors import ConfigError
from multitask_rl.guard.detector import DetectorSettings, RegressionDetector
from multitask_rl.records import Direction, Event, Statistic, TaskEvaluation

_MIN_UNIT_VARIANCE = 0.02
"""Per prompt: near 0 and 1 the sample variance is itself too noisy to divide by."""
_MIN_VARIANCE = 1e-12


@dataclass(kw_only=True, slots=True)
class WatchedMetric:
    """A metric of a task with its detector. All values inside are oriented: higher is better."""

    task: str
    metric: str = ""
    """Key of ``TaskEvaluation.metrics``; empty = the primary metric."""
    direction: Direction = Direction.none
    """As the user states it; ``none`` = as the metric declares."""
    detector: RegressionDetector = field(default_factory=RegressionDetector)
    is_unit: bool | None = None
    """Values lie in [0, 1], as declared or as the first evaluation shows; None before it."""

    @property
    def key(self) -> str:
        """``task`` or ``task/metric``."""
        return f"{self.task}/{self.metric}" if self.metric else self.task

    def observe(self, evaluation: TaskEvaluation, settings: DetectorSettings) -> bool:
        """Add an evaluation; return False if it has no value of the metric, or no standard error.

        A rate that should fall is watched as its complement ``1 - x``: 15 % of a violation rate of 0.02 is
        nothing, 15 % of the 98 % that comply is what matters.

        Raises:
            ConfigError: the metric has no direction.
        """
        statistic = self.find(evaluation)
        if statistic is None or not math.isfinite(statistic.error):
            return False
        if self.is_unit is None:
            seen = [v for v in statistic.values if math.isfinite(v)] or [statistic.mean]
            declared = (statistic.low, statistic.high) == (0.0, 1.0)
            self.is_unit = declared or all(0.0 <= v <= 1.0 for v in seen)
        value = statistic.score + (self.is_unit and statistic.direction is Direction.lower)
        floor = _MIN_UNIT_VARIANCE if self.is_unit else _MIN_VARIANCE
        error = max(statistic.error, math.sqrt(floor / statistic.n))
        scale = 0.0 if self.is_unit else error * math.sqrt(statistic.n)
        self.detector.observe(value, error, evaluation.step, settings, scale=scale)
        return True

    def find(self, evaluation: TaskEvaluation) -> Statistic | None:
        """Return the metric, with the direction in which it is watched; None if it has no value.

        Raises:
            ConfigError: it has no direction.
        """
        statistic = evaluation.statistic(self.metric)
        if statistic is None or statistic.n == 0:
            return None
        self.check_direction(statistic.direction.sign != 0)
        return replace(statistic, direction=self.direction) if self.direction.sign else statistic

    def check_direction(self, is_declared: bool) -> None:
        """Raise ConfigError if neither the metric (``is_declared``) nor the user states a direction."""
        if not (is_declared or self.direction.sign):
            raise ConfigError(
                f"guard.monitor_metrics: {self.key!r} is better neither higher nor lower, so nothing is a "
                f"regression; state it with guard.guard_config.directions.{self.metric}=higher (or lower), "
                "or leave the metric out"
            )

    def missing_event(self, step: int, evaluation: TaskEvaluation | None) -> Event:
        """Return the event that there is no value; an alarm if there never was one."""
        kind, reason = "warn", f"{self.key} has no value at step {step}: these weights are not judged good"
        if not self.detector.count:
            known = evaluation.metrics if evaluation is not None and self.metric else ()
            kind, reason = "alarm", f"{self.key} has had no value up to step {step}: nothing guards it"
            reason += suggest(self.metric, known)
        return Event(step=step, source="guard", kind=kind, reason=reason, task=self.task)

    def can_fall(self, settings: DetectorSettings, min_demonstrated: float) -> bool:
        """Whether there is a demonstrated value to fall from: past the warm-up, and not next to zero."""
        demonstrated = self.detector.demonstrated
        if demonstrated is None or self.detector.count <= settings.warmup:
            return False
        return settings.absolute or not self.is_unit or demonstrated >= min_demonstrated

    def statistics(self, settings: DetectorSettings) -> dict[str, float]:
        """Return the numbers behind a decision, in oriented units."""
        d = self.detector
        demonstrated = d.value if d.demonstrated is None else d.demonstrated
        return {
            "value": d.value,
            "error": d.error,
            "demonstrated": demonstrated,
            "drop": demonstrated - d.value,
            "relevant_drop": d.relevant_drop(settings),
            "cusum": d.cusum,
            "cusum_limit": d.limit(settings),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {"is_unit": self.is_unit, "detector": asdict(self.detector)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self.is_unit = state["is_unit"]
        self.detector = RegressionDetector(**state["detector"])


def build_watched(
    entries: Sequence[str],
    tasks: Collection[str],
    directions: Mapping[str, str],
    metrics: Mapping[str, Mapping[str, bool]] | None = None,
) -> list[WatchedMetric]:
    """Return what to watch; without entries the primary metric of every task.

    Args:
        entries: ``task``, ``task/metric``, or a metric or reward: it is watched in every task that has it.
        tasks: their names.
        directions: of metrics, as the user states them.
        metrics: by task, the names of its metrics and whether each has a direction; None = not known yet.

    Raises:
        ConfigError: an entry is unknown, or names a metric without a direction.
    """
    watched: dict[str, WatchedMetric] = {}
    by_task = metrics or {}
    for entry in entries or list(tasks):
        name, _, key = entry.partition("/")
        keys = (entry, f"reward/{entry}")
        found = [(task, key) for task, known in by_task.items() for key in keys if key in known]
        if name in tasks:
            found = [(name, key)]
        if not found:
            names = {name.removeprefix("reward/") for known in by_task.values() for name in known}
            text = (
                f"guard.monitor_metrics: {entry!r} is not a task, task/metric or metric"
                f"{suggest(entry, [*tasks, *sorted(names)])} (tasks: {', '.join(tasks)}"
            )
            each = (f"; {task}: {', '.join(sorted(known))}" for task, known in by_task.items())
            raise ConfigError(text + "".join(each) + ")")
        for task, key in found:
            metric = WatchedMetric(task=task, metric=key, direction=Direction(directions.get(key, "none")))
            watched[metric.key] = metric
            if not key or metrics is None:
                continue
            known = metrics[task]
            is_component = any(key.startswith(f"{n}/") for n in known if n.startswith("reward/"))
            if key not in known and not is_component:
                raise ConfigError(
                    f"guard.monitor_metrics: {entry!r} is no metric of the task {task}"
                    f"{suggest(key, known)} ({task} has: {', '.join(sorted(known))})"
                )
            metric.check_direction(known.get(key, False))
    return list(watched.values())
