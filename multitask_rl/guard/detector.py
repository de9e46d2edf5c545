"""The guard's detector: one metric over time, and the evidence that it has fallen.

- The *demonstrated value* is the running maximum of a lower confidence bound of the moving average. The best
  observed value would not do: the maximum of N noisy values lies about sigma * sqrt(2 ln N) above the true
  one, so a 15 % rule against it fires in every clean run.
- The *CUSUM* sums the shortfalls of evaluations below the demonstrated value, less half the relevant drop
  each. Noise cancels; a real drop adds up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectorSettings:
    """Settings of ``RegressionDetector``."""

    drop: float
    """The relevant drop, > 0: a part of the demonstrated value, or in the metric's unit (``absolute``)."""
    absolute: bool = False
    limit: float = 5.0
    """h: alarm when the CUSUM exceeds it, standard errors."""
    num_metrics: int = 1
    """Metrics watched together; raises the limit so that all of them together give the false
    alarms of one."""
    smoothing: float = 0.1
    """Gain of the moving average."""
    error_rate: float = 0.05
    """Over all watched metrics together: probability that the lower bound of a moving average exceeds the
    true value, and that an evaluation at that value is not judged good."""
    warmup: int = 4
    """Evaluations before the ratchet starts and an alarm is possible: the bound of few evaluations is wide
    and its running maximum would stay above the true value."""
    min_slack: float = 1.0
    """Lower bound of k. At 1, a fall below two standard errors counts as noise."""

    @property
    def confidence_z(self) -> float:
        """Standard errors that ``error_rate`` amounts to: 1.64 for one metric."""
        return NormalDist().inv_cdf(1.0 - self.error_rate / self.num_metrics)


@dataclass(kw_only=True, slots=True)
class RegressionDetector:
    """One-sided CUSUM against a lower-confidence-bound ratchet. Higher is better; its fields are its state.

    With ``m`` the demonstrated value before the evaluation, ``x`` its mean and ``s`` the standard error:
    ``S <- max(0, S + (m - x) / s - k)``, ``k = max(0.5 * drop / s, 1)``, alarm when ``S > h``.

    Source: E. S. Page, "Continuous inspection schemes", Biometrika 41, 1954, with ``m`` estimated on the
    way.
    """

    count: int = 0
    """Evaluations seen."""
    value: float = 0.0
    """The newest mean; ``error`` is its standard error."""
    error: float = 0.0
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
    """Running maximum of the lower confidence bound, the newest evaluation included."""
    cusum: float = 0.0
    slack: float = 0.0
    """k of the newest evaluation."""
    good_step: int = -1
    """Last step at which the CUSUM was 0 and the value not below its moving average: the latest possible step
    before a fall. The CUSUM alone dates a fall too late: a fall of less than k leaves it at 0."""

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
        """Return h for the number of watched metrics.

        The mean time between false alarms of a CUSUM grows as ``exp(2 k h)`` (Siegmund, "Sequential
        Analysis", 1985). Adding ``ln(M) / (2 k)`` gives M metrics together the false alarms of one.
        """
        return settings.limit + math.log(settings.num_metrics) / (2.0 * max(self.slack, settings.min_slack))

    def alarms(self, settings: DetectorSettings) -> bool:
        """Whether the evidence of a fall exceeds the limit."""
        return self.count > settings.warmup and self.cusum > self.limit(settings)

    def is_good(self, settings: DetectorSettings) -> bool:
        """Whether the newest value agrees with the demonstrated one and the CUSUM is at most half its limit.

        At a constant true value about 95 % of the evaluations are good in all watched metrics.
        """
        if self.demonstrated is None:
            return self.count > 0
        upper = self.value + settings.confidence_z * self.error
        return upper >= self.demonstrated and self.cusum <= 0.5 * self.limit(settings)
