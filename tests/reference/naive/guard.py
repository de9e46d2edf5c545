"""The guard's screen: what a metric has shown it can do, and the evidence that it has fallen since."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from scipy.stats import binom, norm
from scipy.stats import t as student

from .records import Number

DROP, WARMUP, LIMIT = 0.15, 4, 5.0
ONE_IN_A_THOUSAND = 3.09


@dataclass
class Detector:
    """CUSUM of ``(demonstrated - value) / error - k`` against the running maximum of a lower 95 % bound."""

    number_watched: int
    least_scale: float = 0.0
    """A fall counts as a part of at least this."""
    count: int = 0
    is_unit: bool = False
    average: float = 0.0
    average_weight: float = 0.0
    variance: float = 0.0
    scale: float = 0.0
    bounds: list[float] = field(default_factory=list)
    value: float = 0.0
    demonstrated: float | None = None
    cusum: float = 0.0
    slack: float = 0.0

    @property
    def z(self) -> float:
        """Quantile that the chance of 5 % over all metrics together amounts to."""
        chance = torch.tensor(1.0 - 0.05 / self.number_watched, dtype=torch.float64)
        return math.sqrt(2.0) * float(torch.erfinv(2.0 * chance - 1.0))

    @property
    def error(self) -> float:
        return math.sqrt(self.variance)

    @property
    def limit(self) -> float:
        return LIMIT + math.log(self.number_watched) / (2.0 * max(self.slack, 1.0))

    def observe(self, number: Number, ends: tuple[float, float] | None) -> None:
        """Add an evaluation; rates that should fall are watched as ``1 - x``, other metrics as ``-x``."""
        if not self.count:
            seen = [v for v in number.by_prompt if math.isfinite(v)]
            self.is_unit = ends == (0.0, 1.0) or (ends is None and all(0.0 <= v <= 1.0 for v in seen))
        if number.direction == "higher":
            value = number.mean
        else:
            value = 1.0 - number.mean if self.is_unit else -number.mean
        error = max(number.error, math.sqrt((0.02 if self.is_unit else 1e-12) / number.n))
        scale = 0.0 if self.is_unit else max(self.least_scale, error * math.sqrt(number.n))
        self.demonstrated = self.lower_bound() if self.count else None
        self.count += 1
        gain = max(0.1, 1.0 / self.count)
        self.variance += gain * (error**2 - self.variance)
        self.scale += gain * (scale - self.scale)
        self.value = value
        if self.demonstrated is not None:
            drop = DROP * max(abs(self.demonstrated), self.scale)
            self.slack = max(1.0, 0.5 * drop / self.error)
            self.cusum = max(0.0, self.cusum + (self.demonstrated - value) / self.error - self.slack)
        self.average += gain * (value - self.average)
        self.average_weight = (1.0 - gain) ** 2 * self.average_weight + gain**2
        self.bounds.append(self.average - self.z * self.error * math.sqrt(self.average_weight))

    def lower_bound(self) -> float:
        """Newest bound while there are few; from the fifth on the highest of the fourth and later ones."""
        return max(self.bounds[WARMUP - 1 :]) if len(self.bounds) > WARMUP else self.bounds[-1]

    @property
    def alarms(self) -> bool:
        if self.count <= WARMUP or self.demonstrated is None or (self.is_unit and self.demonstrated < 0.05):
            return False
        return self.cusum > self.limit

    @property
    def is_good(self) -> bool:
        if self.demonstrated is None:
            return self.count > 0
        return self.value + self.z * self.error >= self.demonstrated and self.cusum <= 0.5 * self.limit


@dataclass
class Guard:
    """Detectors by what they watch: a task (its primary metric) or ``task/metric``."""

    watched: list[str]
    begin_at_zero: list[str] = field(default_factory=list)
    """Those whose best value is 0, where a part of the level means nothing."""

    def __post_init__(self) -> None:
        self.detectors = {
            key: Detector(len(self.watched), 1.0 if key in self.begin_at_zero else 0.0)
            for key in self.watched
        }
        self.good: dict[str, Number] = {}
        self.since_good = 0

    def observe(
        self, numbers: Mapping[str, Number], ends: Mapping[str, tuple[float, float] | None]
    ) -> tuple[bool, bool]:
        """Return whether there is an alarm, and whether the weights are judged good."""
        seen = [key for key in self.watched if key in numbers and math.isfinite(numbers[key].error)]
        for key in seen:
            self.detectors[key].observe(numbers[key], ends.get(key))
        alarm = any(self.detectors[key].alarms for key in seen)
        had_values = [key for key, d in self.detectors.items() if d.count]
        good = not alarm and bool(seen) and len(had_values) == len(seen)
        good = good and all(self.detectors[key].is_good for key in seen)
        if self.since_good < WARMUP:
            good = good and not any(self.is_below_good(key, numbers[key]) for key in seen)
        if good:
            self.since_good = 0
        elif len(seen) == len(had_values):
            self.since_good += 1
        if good:
            self.good = {key: numbers[key] for key in self.watched if key in numbers}
        return alarm, good

    def is_below_good(self, key: str, number: Number) -> bool:
        """Compare with the evaluation last judged good, prompt by prompt, once falls can be detected."""
        detector, good = self.detectors[key], self.good.get(key)
        if good is None or detector.count <= WARMUP or detector.demonstrated is None:
            return False
        if detector.is_unit and detector.demonstrated < 0.05:
            return False
        sign = 1.0 if number.direction == "higher" else -1.0
        now, then = torch.tensor(number.by_prompt), torch.tensor(good.by_prompt)
        now, then = now.double() * sign, then.double() * sign
        both = now.isfinite() & then.isfinite() if len(now) == len(then) else torch.zeros(0)
        smaller = min(int(now.isfinite().sum()), int(then.isfinite().sum()))
        if smaller < 2:
            return False
        if len(both) and 2 * int(both.sum()) >= smaller:
            drops = (then - now)[both]
            drop, count = float(drops.mean()), len(drops)
            if all(v in (0.0, 1.0) for v in (*now[both].abs().tolist(), *then[both].abs().tolist())):
                worse, better = int((drops == 1).sum()), int((drops == -1).sum())
                changes = binom(worse + better, 0.5)
                z = _one_sided_z(float(changes.sf(worse) + 0.5 * changes.pmf(worse)))
            else:
                spread = float(drops.std())
                z = _student(drop, spread / math.sqrt(count), count - 1)
        else:
            a, b = now[now.isfinite()], then[then.isfinite()]
            drop = float(b.mean() - a.mean())
            z = _student(drop, math.hypot(_error(a), _error(b)), smaller - 1)
        level = good.mean if sign > 0 else (1.0 - good.mean if detector.is_unit else -good.mean)
        least = float(norm.isf(norm.sf(ONE_IN_A_THOUSAND) / len(self.watched)))
        return z > least and drop > DROP * max(abs(level), detector.scale)


def _error(values: torch.Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values))


def _student(drop: float, error: float, degrees: int) -> float:
    if error == 0.0:
        return math.copysign(math.inf, drop) if drop else 0.0
    return _one_sided_z(float(student.sf(drop / error, degrees)))


def _one_sided_z(chance: float) -> float:
    return float(norm.isf(chance))
