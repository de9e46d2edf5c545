"""One watched metric: which number it is, which way is up, and the evidence that it has fallen."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from statistics import NormalDist
from typing import Any

from multitask_rl.config.schema.ranges import suggest
from multitask_rl.errors import ConfigError
from multitask_rl.records import Direction, Event, Statistic, TaskEvaluation
from multitask_rl.statistics.definitions import is_comparable, measured
from multitask_rl.statistics.intervals import PairedTest, compare_paired, summarise

_MIN_UNIT_VARIANCE = 0.02
"""Least variance per prompt in [0, 1]: near the ends the sample variance is too noisy to divide by."""
_MIN_VARIANCE = 1e-12
_ZERO_KL = 1e-6
"""The KL of equal policies is below this rounding error, in nats per token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectorSettings:
    """Settings of ``RegressionDetector``."""

    drop: float
    """The relevant drop, > 0: a part of the demonstrated value, or in the metric's unit (``absolute``)."""
    absolute: bool = False
    limit: float = 5.0
    """h: alarm when the CUSUM exceeds it, standard errors."""
    num_metrics: int = 1
    """Metrics watched together (see ``RegressionDetector.limit``)."""
    smoothing: float = 0.1
    """Gain of the moving average."""
    error_rate: float = 0.05
    """Probability, over all watched metrics together, of each of two errors: the lower bound of a moving
    average exceeds the true value; an evaluation at the true value is not judged good."""
    warmup: int = 4
    """Evaluations before the ratchet starts and an alarm is possible: the bound of few evaluations is wide
    and its running maximum would stay above the true value."""
    min_slack: float = 1.0
    """Lower bound of k. At 1, a fall below two standard errors counts as noise."""

    @property
    def confidence_z(self) -> float:
        """Normal quantile of ``error_rate``, in standard errors: 1.64 for one metric."""
        return NormalDist().inv_cdf(1.0 - self.error_rate / self.num_metrics)


@dataclass(kw_only=True, slots=True)
class RegressionDetector:
    """One-sided CUSUM against a lower-confidence-bound ratchet. Higher is better; its fields are its state.

    The *demonstrated value* is the running maximum of a lower confidence bound of the moving average: the
    maximum of N noisy values would lie about sigma * sqrt(2 ln N) above the true one. The *CUSUM* sums the
    shortfalls below it, less half the relevant drop each: noise cancels, a real drop adds up.

    With ``m`` the demonstrated value before the evaluation, ``x`` its mean and ``s`` the smoothed standard
    error: ``S <- max(0, S + (m - x) / s - k)``, ``k = max(0.5 * drop / s, 1)``. The alarm comes when ``S``
    exceeds ``limit()`` after the warm-up. The drop and the other settings are in ``DetectorSettings``.

    Source: E. S. Page, "Continuous inspection schemes", Biometrika 41, 1954; here ``m`` is
    estimated.
    """

    count: int = 0
    """Evaluations seen."""
    value: float = 0.0
    """The newest mean."""
    error: float = 0.0
    """Smoothed standard error of a mean: the root of ``variance``."""
    average: float = 0.0
    """Moving average of the means."""
    average_weight: float = 0.0
    """Sum of squared weights in the average: its variance over that of one mean."""
    variance: float = 0.0
    """Moving average of the squared standard error."""
    scale: float = 0.0
    """Moving average of ``scale`` of ``observe``; 0 = a relative drop is a part of the demonstrated value."""
    demonstrated: float | None = None
    """The demonstrated value, without the newest evaluation; None before the second evaluation."""
    bound: float = -math.inf
    """Lower confidence bound of the moving average, the newest evaluation included: its running maximum, from
    the end of the warm-up on."""
    cusum: float = 0.0
    slack: float = 0.0
    """k of the newest evaluation."""
    good_step: int = -1
    """Last step at which the CUSUM was 0 and the value not below its moving average: the latest possible step
    before a fall (a fall of less than k leaves the CUSUM at 0)."""

    def observe(
        self, value: float, error: float, step: int, settings: DetectorSettings, *, scale: float = 0.0
    ) -> None:
        """Add an evaluation of the weights of ``step``: its mean (higher is better) and standard error > 0.

        ``scale`` is the smallest value that a relative drop refers to, for metrics without a natural zero.
        """
        self.demonstrated = self.bound if self.count else None
        self.count += 1
        gain = max(settings.smoothing, 1.0 / self.count)
        self.variance += gain * (error * error - self.variance)
        self.scale += gain * (scale - self.scale)
        self.value, self.error = value, math.sqrt(self.variance)
        if self.demonstrated is not None:
            divisor = max(self.error, 1e-12)
            self.slack = max(settings.min_slack, 0.5 * self.relevant_drop(settings) / divisor)
            self.cusum = max(0.0, self.cusum + (self.demonstrated - value) / divisor - self.slack)
        if self.demonstrated is None or (self.cusum == 0.0 and value >= self.average):
            self.good_step = step
        self.average += gain * (value - self.average)
        self.average_weight = (1.0 - gain) ** 2 * self.average_weight + gain * gain
        bound = self.average - settings.confidence_z * self.error * math.sqrt(self.average_weight)
        self.bound = bound if self.count <= settings.warmup else max(self.bound, bound)

    def relevant_drop(self, settings: DetectorSettings) -> float:
        """Return the relevant drop in the metric's unit."""
        if settings.absolute:
            return settings.drop
        return settings.drop * max(abs(self.demonstrated or 0.0), self.scale)

    def limit(self, settings: DetectorSettings) -> float:
        """Return the limit of the CUSUM: ``h + ln(M) / (2 k)`` for M watched metrics.

        The mean number of evaluations between false alarms grows as ``exp(2 k h)`` (Siegmund, "Sequential
        Analysis", 1985). So M metrics together have as many false alarms as one metric with limit ``h``.
        """
        return settings.limit + math.log(settings.num_metrics) / (2.0 * max(self.slack, settings.min_slack))

    def alarms(self, settings: DetectorSettings) -> bool:
        """Whether the evidence of a fall exceeds the limit, after the warm-up."""
        return self.count > settings.warmup and self.cusum > self.limit(settings)

    def is_good(self, settings: DetectorSettings) -> bool:
        """Whether the newest value is not below the demonstrated one, and the CUSUM at most half its limit.

        The newest value counts with ``confidence_z`` standard errors added. Without a demonstrated value
        the answer is True after the first evaluation.
        """
        if self.demonstrated is None:
            return self.count > 0
        upper = self.value + settings.confidence_z * self.error
        return upper >= self.demonstrated and self.cusum <= 0.5 * self.limit(settings)


@dataclass(kw_only=True, slots=True)
class WatchedMetric:
    """A metric of a task with its detector. All values inside are oriented: higher is better."""

    task: str
    metric: str = ""
    """Key of ``TaskEvaluation.metrics``; empty = the primary metric."""
    direction: Direction = Direction.none
    """Direction that the user states; ``none`` = the one that the metric declares."""
    is_declared: bool = False
    """Whether the task declares a metric of this name; else it may be misspelt."""
    detector: RegressionDetector = field(default_factory=RegressionDetector)
    is_unit: bool | None = None
    """Whether values lie in [0, 1]: as declared, else as in the first evaluation; None = none yet."""
    least_scale: float = 0.0
    """Smallest value that a relative drop refers to. It is 1 for ``kl`` and for metrics that begin at 0,
    their best value: while values are below 1, the drop is in the metric's unit."""
    measured: tuple[str, ...] = ()
    """Hashes of what the values measure (``definitions.measured``), and the direction; empty = no value."""

    @property
    def key(self) -> str:
        """``task`` or ``task/metric``."""
        return f"{self.task}/{self.metric}" if self.metric else self.task

    def observe(self, evaluation: TaskEvaluation, settings: DetectorSettings) -> bool:
        """Add an evaluation; return False if it has no value of the metric, or no standard error.

        A rate that should fall is watched as its complement ``1 - x``: 15 % of a violation rate of 0.02 is a
        negligible change, 15 % of the 98 % that comply is not. ConfigError if it has no direction.
        """
        statistic = self.find(evaluation)
        if statistic is None or not math.isfinite(statistic.error):
            return False
        if self.is_unit is None:
            seen = [v for v in statistic.values if math.isfinite(v)] or [statistic.mean]
            ends = statistic.low, statistic.high
            is_undeclared = ends == (-math.inf, math.inf)
            self.is_unit = ends == (0.0, 1.0) or (is_undeclared and all(0.0 <= v <= 1.0 for v in seen))
            is_lower = statistic.direction is Direction.lower
            if is_lower and not self.is_unit and ends[0] == 0.0:
                # the KL of equal policies may be a rounding error; that of an anchor added later is not 0
                self.least_scale = float(self.metric == "kl" or max(seen) < _ZERO_KL)
        value = statistic.score + (self.is_unit and statistic.direction is Direction.lower)
        floor = _MIN_UNIT_VARIANCE if self.is_unit else _MIN_VARIANCE
        error = max(statistic.error, math.sqrt(floor / statistic.n))
        scale = 0.0 if self.is_unit else max(error * math.sqrt(statistic.n), self.least_scale)
        self.detector.observe(value, error, evaluation.step, settings, scale=scale)
        return True

    def begin_anew(self, evaluation: TaskEvaluation) -> Event | None:
        """Drop the history if definition, sampling or prompts of the metric changed; return that event."""
        statistic = evaluation.statistic(self.metric)
        if statistic is None:
            return None
        before = self.measured
        direction = self.direction if self.direction.sign else statistic.direction
        now = (*measured(evaluation, self.metric), direction.value)
        self.measured = tuple(part or former for part, former in zip_longest(now, before, fillvalue=""))
        if is_comparable(before, now):
            return None
        self.forget()
        reason = (
            f"{self.key}: what it measures has changed (rewards, weights, constraints, direction, "
            "environment, teacher, sampling or prompts). Earlier values are dropped; the guard warms up again"
        )
        return Event(step=evaluation.step, source="guard", kind="redefined", reason=reason, task=self.task)

    def forget(self) -> None:
        """Drop all values seen."""
        self.detector, self.is_unit, self.least_scale = RegressionDetector(), None, 0.0

    def find(self, evaluation: TaskEvaluation) -> Statistic | None:
        """Return the metric, with the user's direction if one is set; None if it has no value.

        Raises:
            ConfigError: neither the user nor the metric states a direction.
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
                f"guard.monitor_metrics: {self.key!r} has no direction, so no change of it is a "
                f"regression; give one with guard.guard_config.directions.{self.metric}=higher (or lower), "
                "or leave the metric out"
            )

    def missing_event(self, step: int, evaluation: TaskEvaluation | None) -> Event:
        """Return the event that the evaluation lacks the metric; an alarm if every evaluation lacked it."""
        kind, reason = "warn", f"{self.key} has no value at step {step}: these weights are not judged good"
        if not self.detector.count:
            known = evaluation.metrics if evaluation is not None and self.metric else ()
            kind, reason = "alarm", f"{self.key} has had no value up to step {step}: nothing guards it"
            reason += "" if self.is_declared else suggest(self.metric, known)
            if evaluation is not None and evaluation.primary.n == 1:
                reason += "; one held-out prompt has no standard error: hold out more rows"
        return Event(step=step, source="guard", kind=kind, reason=reason, task=self.task)

    def can_fall(self, settings: DetectorSettings, min_demonstrated: float) -> bool:
        """Whether a fall can be detected: the warm-up is over and there is a demonstrated value.

        For a relative threshold and a metric in [0, 1] that value must also reach ``min_demonstrated``.
        """
        demonstrated = self.detector.demonstrated
        if demonstrated is None or self.detector.count <= settings.warmup:
            return False
        return settings.absolute or not self.is_unit or demonstrated >= min_demonstrated

    def fall_since(
        self, evaluation: TaskEvaluation, good: Sequence[float], z: float, settings: DetectorSettings
    ) -> PairedTest | None:
        """Return the paired test of the metric against earlier values; None if it shows no relevant drop.

        Args:
            evaluation: the present one.
            good: values per prompt when the weights were last judged good.
            z: normal quantile for one metric; the test must exceed it after correction for all watched ones.
            settings: give the relevant drop, which the fall must exceed.
        """
        found = self.find(evaluation)
        if found is None:
            return None
        test = compare_paired(found.values, good, direction=found.direction)
        complement = float(bool(self.is_unit) and found.direction is Direction.lower)
        level = summarise(good).mean * found.direction.sign + complement
        scale = 1.0 if settings.absolute else max(abs(level), self.detector.scale)
        tail = 0.5 * math.erfc(z / math.sqrt(2.0))  # ``NormalDist.cdf`` is 0 from 9 on
        limit = -NormalDist().inv_cdf(tail / settings.num_metrics)
        return test if test.z > limit and test.drop > settings.drop * scale else None

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

    def in_own_unit(self, value: float) -> float:
        """Return an oriented ``value`` (higher is better) in the metric's own unit and direction."""
        if self.measured[-1:] != (Direction.lower.value,):
            return value
        return float(bool(self.is_unit)) - value

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        own = {"is_unit": self.is_unit, "least_scale": self.least_scale, "measured": self.measured}
        return {**own, "detector": asdict(self.detector)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self.is_unit, self.least_scale = state["is_unit"], state["least_scale"]
        self.measured = tuple(state["measured"])
        self.detector = RegressionDetector(**state["detector"])


def build_watched(
    entries: Sequence[str],
    tasks: Collection[str],
    directions: Mapping[str, str],
    metrics: Mapping[str, Mapping[str, bool]] | None,
) -> list[WatchedMetric]:
    """Return the metrics to watch; without ``entries`` the primary metric of every task.

    An entry is ``task``, ``task/metric``, or the name of a metric or reward, which is watched in every task
    that has it. ``metrics``: task -> metric -> whether it has a direction; None = not known yet.

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
            each = (f"; {task}: {', '.join(sorted(known))}" for task, known in by_task.items())
            raise ConfigError(
                f"guard.monitor_metrics: {entry!r} is not a task, task/metric or metric"
                f"{suggest(entry, [*tasks, *sorted(names)])} (tasks: {', '.join(tasks)}{''.join(each)})"
            )
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
            metric.is_declared = key in known
    return list(watched.values())
