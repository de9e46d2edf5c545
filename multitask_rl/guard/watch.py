"""One watched metric: which number it is, which way is up, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from multitask_rl.config.schema.build import suggest
from multitask_rl.errors import ConfigError
from multitask_rl.guard.detector import DetectorSettings, RegressionDetector
from multitask_rl.records import Direction, Event, Statistic, TaskEvaluation

__all__ = ["MetricWatch"]

_MIN_UNIT_VARIANCE = 0.02
"""Per prompt: near 0 and 1 the sample variance is itself too noisy to divide by."""
_MIN_VARIANCE = 1e-12


@dataclass(kw_only=True, slots=True)
class MetricWatch:
    """A metric of a task with its detector. All values inside are oriented: higher is better."""

    task: str
    metric: str = ""
    """Key of ``TaskEvaluation.metrics``; empty = the primary metric."""
    direction: Direction = Direction.none
    """As the user states it; ``none`` = as the metric declares."""
    detector: RegressionDetector = field(default_factory=RegressionDetector)
    is_unit: bool | None = None
    """Values lie in [0, 1], as declared or as the first evaluation says; None before it."""

    @property
    def key(self) -> str:
        """``task`` or ``task/metric``."""
        return f"{self.task}/{self.metric}" if self.metric else self.task

    def observe(self, evaluation: TaskEvaluation, settings: DetectorSettings) -> bool:
        """Add an evaluation; False when it holds no value of the metric, or no error to judge it by.

        A rate that should fall is watched as its complement ``1 - x``: 15 % of a violation rate of 0.02 is
        nothing, 15 % of the 98 % that comply is what matters.

        Raises:
            ConfigError: neither the metric nor the user says which way it gets better.
        """
        statistic = self.find(evaluation)
        if statistic is None or not math.isfinite(statistic.error):
            return False
        if self.is_unit is None:
            seen = [v for v in statistic.values if math.isfinite(v)] or [statistic.mean]
            declared = (statistic.low, statistic.high) == (0.0, 1.0)
            self.is_unit = declared or all(0.0 <= v <= 1.0 for v in seen)
        value = statistic.mean * statistic.direction.sign
        if self.is_unit and statistic.direction is Direction.lower:
            value += 1.0
        floor = _MIN_UNIT_VARIANCE if self.is_unit else _MIN_VARIANCE
        error = max(statistic.error, math.sqrt(floor / statistic.n))
        scale = 0.0 if self.is_unit else error * math.sqrt(statistic.n)
        self.detector.observe(value, error, evaluation.step, settings, scale=scale)
        return True

    def find(self, evaluation: TaskEvaluation) -> Statistic | None:
        """Return the metric, with the direction in which it is watched; None: it has no value.

        Raises:
            ConfigError: it has no direction.
        """
        statistic = evaluation.statistic(self.metric)
        if statistic is None or statistic.n == 0:
            return None
        if self.direction.sign:
            statistic = replace(statistic, direction=self.direction)
        if not statistic.direction.sign:
            raise self.lacks_direction()
        return statistic

    def lacks_direction(self) -> ConfigError:
        """Return the error that neither the metric nor the user says which way it gets better."""
        return ConfigError(
            f"guard.monitor_metrics: {self.key!r} is better neither higher nor lower, so nothing is a "
            f"regression; state it with guard.guard_config.directions.{self.metric}=higher (or lower), "
            "or leave the metric out"
        )

    def tell_missing(self, step: int, evaluation: TaskEvaluation | None) -> Event:
        """Say that there is no value; an alarm if there never was one."""
        kind, reason = "warn", f"{self.key} has no value at step {step}: these weights are not judged good"
        if not self.detector.count:
            known = evaluation.metrics if evaluation is not None and self.metric else ()
            kind, reason = "alarm", f"{self.key} has had no value up to step {step}: nothing guards it"
            reason += suggest(self.metric, known)
        return Event(step=step, source="guard", kind=kind, reason=reason, task=self.task)

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
    entries: Sequence[str],
    tasks: Collection[str],
    directions: Mapping[str, str],
    metrics: Mapping[str, Mapping[str, bool]] | None = None,
) -> list[MetricWatch]:
    """Return what to watch; without entries the primary metric of every task.

    Args:
        entries: ``task``, ``task/metric``, or a metric or reward: it is watched in every task that has it.
        tasks: their names.
        directions: of metrics, as the user states them.
        metrics: by task, the names of its metrics and whether each has a direction; None = not known yet.

    Raises:
        ConfigError: an entry names nothing that is there, or a metric without a direction.
    """
    watches: dict[str, MetricWatch] = {}
    for entry in entries or list(tasks):
        name, _, metric = entry.partition("/")
        found = [(name, metric)] if name in tasks else _having(entry, metrics or {})
        if not found:
            raise ConfigError(_unknown(entry, tasks, metrics or {}))
        for task, own in found:
            watch = MetricWatch(task=task, metric=own, direction=Direction(directions.get(own, "none")))
            if own and metrics is not None:
                _check(watch, entry, metrics[task])
            watches[watch.key] = watch
    return list(watches.values())


def _having(name: str, metrics: Mapping[str, Mapping[str, bool]]) -> list[tuple[str, str]]:
    """Return task and metric wherever a metric, or a reward, has that name."""
    keys = (name, f"reward/{name}")
    return [(task, key) for task, own in metrics.items() for key in keys if key in own]


def _check(watch: MetricWatch, entry: str, known: Mapping[str, bool]) -> None:
    """Refuse a metric that the task will not have, or that says nowhere which way is better."""
    is_component = any(watch.metric.startswith(f"{name}/") for name in known if name.startswith("reward/"))
    if watch.metric not in known and not is_component:
        raise ConfigError(
            f"guard.monitor_metrics: {entry!r} is no metric of the task {watch.task}"
            f"{suggest(watch.metric, known)} ({watch.task} has: {', '.join(sorted(known))})"
        )
    if not known.get(watch.metric) and not watch.direction.sign:
        raise watch.lacks_direction()


def _unknown(entry: str, tasks: Collection[str], metrics: Mapping[str, Mapping[str, bool]]) -> str:
    names = {name.removeprefix("reward/") for own in metrics.values() for name in own}
    text = (
        f"guard.monitor_metrics: {entry!r} is not a task, task/metric or metric"
        f"{suggest(entry, [*tasks, *sorted(names)])} (tasks: {', '.join(tasks)}"
    )
    return text + "".join(f"; {task}: {', '.join(sorted(own))}" for task, own in metrics.items()) + ")"
