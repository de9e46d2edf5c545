"""Differences of arms: several runs each, one per seed, that were evaluated on the same held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from multitask_rl.statistics.intervals import Difference, compare_means, is_noise, mean_of

Values = NDArray[np.float64]
_SHARPNESS = 4 / 3
_LEVEL = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Variance of a mean over seeds and prompts, in two parts with their degrees of freedom.

    ``seeds``: variance between runs of other seeds, with the noise of each value. ``prompts``: the further
    variance between other prompts.
    """

    seeds: float
    seeds_degrees: float
    prompts: float
    """Variance between prompts, at least 0."""
    prompts_degrees: float
    total: float
    """Variance of the mean: the sum of both; less if ``prompts`` was negative, at least ``seeds / 2``."""

    def half_width(self, level: float = _LEVEL) -> float:
        """Return half of the interval that covers ``1 - level``.

        Two variances with few and many degrees of freedom have no common Student's t. Its quantile is the
        mean of both, weighted by the variances to the power of 4/3.

        Source: Cochran and Cox, "Experimental Designs", 1957, 4.14, with the power of 1. With two seeds that
        covers up to 98 %, the power of 4/3 covers 93 to 97 % (``docs/simulate_compare.py``).
        """
        one, other = float(self.seeds**_SHARPNESS), float(self.prompts**_SHARPNESS)
        of_seeds, of_prompts = (
            float(special.stdtrit(degrees, 1 - level / 2)) if weight else 0.0
            for degrees, weight in ((self.seeds_degrees, one), (self.prompts_degrees, other))
        )
        quantile = (one * of_seeds + other * of_prompts) / (one + other)
        return quantile * math.sqrt(self.total)

    def p_value(self, delta: float) -> float:
        """Return the level whose interval around ``delta`` ends at 0."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if self.half_width(middle) <= abs(delta) else (middle, high)
        return high


def spread_of(layers: Sequence[Values], profile: Sequence[Values]) -> Spread:
    """Return the variance of a sum of means of ``layers``, tables [seeds, prompts] without NaN.

    ``V = V_seeds + V_prompts - V_noise``: clustered by seed, by prompt, and by both at once.

    - ``V_seeds``: variance of the means of the runs / their number, summed over layers.
    - ``V_prompts``: variance of the values of ``profile``, per prompt, / their number, summed.
    - ``V_noise``: mean square of what neither seed nor prompt explains / number of values. Both of the others
      hold it. By chance ``V_prompts - V_noise`` may be negative: ``V`` is at least half of ``V_seeds``.

    Source: Cameron, Gelbach and Miller, "Robust inference with multiway clustering", J. Bus. Econ. Stat. 29,
    2011, eq. 2.8; for balanced tables the two-way analysis of variance with random effects. Degrees of sums:
    Satterthwaite, Biometrics Bulletin 2, 1946.
    """
    seeds, noise = [], 0.0
    for layer in layers:
        # a page calls this ten thousand times: sums take half the time of np.mean and np.var
        num_seeds, num_prompts = layer.shape
        of_seeds, of_prompts = layer.sum(1) / num_prompts, layer.sum(0) / num_seeds
        rest = (layer - of_seeds[:, None] - of_prompts + of_seeds.sum() / num_seeds).ravel()
        noise += float(rest @ rest) / ((num_seeds - 1) * (num_prompts - 1)) / layer.size
        seeds.append(_error_of_mean(of_seeds))
    prompts = [_error_of_mean(own) for own in profile]
    from_seeds = sum(variance for variance, _ in seeds)
    from_prompts = sum(variance for variance, _ in prompts) - noise
    return Spread(
        seeds=from_seeds,
        seeds_degrees=_degrees(seeds),
        prompts=max(0.0, from_prompts),
        prompts_degrees=_degrees(prompts),
        total=max(from_seeds / 2, from_seeds + from_prompts),
    )


def _error_of_mean(values: Values) -> tuple[float, int]:
    """Return the variance of the mean of independent ``values``, two or more, and its degrees of freedom."""
    number = len(values)
    rest = values - values.sum() / number
    return float(rest @ rest) / (number - 1) / number, number - 1


def _degrees(parts: Sequence[tuple[float, int]]) -> float:
    """Return the degrees of a sum of variances, given as (variance, degrees).

    Satterthwaite's, with 2 added to the degrees of each estimate and taken off the result: estimates of
    variances with few degrees make it too small otherwise.
    """
    degrees = [own for _, own in parts]
    below = sum(variance**2 / (own + 2) for variance, own in parts)
    found = sum(variance for variance, _ in parts) ** 2 / below - 2 if below else 0.0
    return float(min(sum(degrees), max(min(degrees), found)))


def compare_arms(
    base: Sequence[Sequence[float]],
    other: Sequence[Sequence[float]],
    *,
    paired: bool,
    paired_seeds: bool = False,
    crossed: bool = True,
) -> Difference:
    """Return the difference of two arms, each a table [runs, held-out prompts]; NaN = failed to score.

    With several runs on both sides the interval is that of other seeds and other prompts (``spread_of``).
    With one run on a side it is that of other prompts and these runs (``compare_means``).

    Args:
        base: values of the first arm.
        other: values of the second arm.
        paired: both have the same prompts. Prompts that one run could not score are left out.
        paired_seeds: run ``i`` of both has the same seed.
        crossed: all runs of an arm have the same prompts; else the means of the runs are compared, and ``n``
            counts runs.

    Raises:
        ValueError: tables of different shape that are paired.
    """
    if not crossed:
        if min(len(base), len(other)) < 2:
            return compare_means(*([v for run in arm for v in run] for arm in (base, other)), paired=False)
        means = ([mean_of([v for v in run if math.isfinite(v)]) for run in arm] for arm in (base, other))
        return compare_means(*means, paired=paired_seeds)
    first, second = (np.array([_array(run) for run in arm]) for arm in (base, other))
    if paired:
        whole = np.isfinite(first).all(0) & np.isfinite(second).all(0)
        first, second = first[:, whole], second[:, whole]
    else:
        first, second = (own[:, np.isfinite(own).all(0)] for own in (first, second))
    per_prompt = [own.mean(0).clip(own.min(0), own.max(0)) for own in (first, second)]  # as ``mean_of``
    if min(len(first), len(second)) < 2 or min(first.shape[1], second.shape[1]) < 2:
        return compare_means(*(own.tolist() for own in per_prompt), paired=paired)
    layers = [second - first] if paired and paired_seeds else [first, second]
    profile = [per_prompt[1] - per_prompt[0]] if paired else per_prompt
    found = spread_of(layers, profile)
    if is_noise(math.sqrt(found.total), [*per_prompt[0], *per_prompt[1]]):
        return compare_means(*(own.tolist() for own in per_prompt), paired=paired)
    start, end = float(first.mean()), float(second.mean())
    half = found.half_width()
    return Difference(
        base=start,
        other=end,
        delta=end - start,
        low=end - start - half,
        high=end - start + half,
        p_value=found.p_value(end - start),
        n=min(first.shape[1], second.shape[1]),
        paired=paired,
    )


def mean_of_arm(values: Sequence[Sequence[float]], *, crossed: bool = True) -> tuple[float, float, float]:
    """Return the mean of an arm [runs, held-out prompts] and the ends of its 95 % interval.

    With several runs the interval covers other seeds and prompts, with one run other prompts; it is NaN
    without variance. ``crossed``: see ``compare_arms``.
    """
    if len(values) > 1 and not crossed:
        runs = np.array([float(np.nanmean(_array(run))) for run in values])
        error, degrees = _error_of_mean(runs)
        spread = Spread(
            seeds=error,
            seeds_degrees=_degrees([(error, degrees)]),
            prompts=0.0,
            prompts_degrees=1.0,
            total=error,
        )
        mean = float(runs.mean())
    else:
        table = _array(values)
        whole = np.isfinite(table).all(0)
        table = table if whole.all() else table[:, whole]
        if not table.shape[1]:
            return math.nan, math.nan, math.nan
        per_prompt = table.sum(0) / len(table)
        mean = float(per_prompt.sum() / len(per_prompt))
        if len(per_prompt) < 2:
            return mean, math.nan, math.nan
        if len(table) > 1:
            spread = spread_of([table], [per_prompt])
        else:
            error, degrees = _error_of_mean(per_prompt)
            spread = Spread(seeds=0.0, seeds_degrees=1.0, prompts=error, prompts_degrees=degrees, total=error)
    half = spread.half_width() if spread.total > 0 else math.nan
    return mean, mean - half, mean + half


def _array(values: Sequence[float] | Sequence[Sequence[float]]) -> Values:
    return np.asarray(values, dtype=float)
