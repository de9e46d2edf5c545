"""Intervals over seeds and prompts: by hand, and their coverage (docs/simulate_compare.py has more)."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from multitask_rl.statistics.intervals import compare_means
from multitask_rl.statistics.seeds import compare_arms, mean_of_arm


def test_two_paired_seeds_by_hand() -> None:
    # differences [[1, 3], [2, 6]]: means of runs 2 and 4, of prompts 1.5 and 4.5; what neither explains is
    # +-0.5. V_seeds = 2/2 = 1; V_noise = 1/4; V_prompts = 4.5/2 = 2.25, less the noise 2. One degree each, so
    # any weights give t(1) = 12.706.
    found = compare_arms([[0, 0], [0, 0]], [[1, 3], [2, 6]], paired=True, paired_seeds=True)
    assert found.delta == pytest.approx(3.0)
    assert found.high - found.delta == pytest.approx(12.7062 * math.sqrt(3), rel=1e-4)
    assert found.delta - found.low == pytest.approx(12.7062 * math.sqrt(3), rel=1e-4)
    # P(|t(1)| > 3 / sqrt(3)) = 2 atan(1 / sqrt(3)) / pi
    assert found.p_value == pytest.approx(1 / 3, rel=1e-6)
    assert found.verdict(higher_is_better=True) == "not told apart"


def test_seeds_of_one_kind_each_have_their_own_degrees() -> None:
    # without any effect of prompts the variance is that of the means of the runs: 1/2 + 1/2
    base, other = [[0.0, 0.0, 0.0], [2.0, 2.0, 2.0]], [[10.0, 10.0, 10.0], [12.0, 12.0, 12.0]]
    found = compare_arms(base, other, paired=True)
    # V = 1 + 1, of degrees 2: (2^2 / (2/3)) - 2 = 4, at most 1 + 1; t(2) = 4.3027
    assert found.high - found.delta == pytest.approx(4.3027 * math.sqrt(2), rel=1e-4)


def test_one_run_a_side_is_the_interval_of_its_prompts() -> None:
    base, other = [0.1, 0.5, math.nan, 0.9, 0.3], [0.2, 0.7, 0.4, 0.8, 0.6]
    assert compare_arms([base], [other], paired=True) == compare_means(base, other, paired=True)
    mixed = compare_arms([base, base], [other], paired=True)
    assert (mixed.delta, mixed.n) == (compare_means(base, other, paired=True).delta, 4)


def test_runs_with_prompts_of_their_own_are_compared_as_runs() -> None:
    found = compare_arms([[1, 2, 3], [2, 4]], [[5, 7], [8, 9, 10]], paired=False, crossed=False)
    assert found == compare_means([2.0, 3.0], [6.0, 9.0], paired=False)


def test_equal_runs_have_no_interval() -> None:
    found = compare_arms([[0.5] * 9] * 3, [[0.5] * 9] * 3, paired=True, paired_seeds=True)
    assert found.verdict(higher_is_better=True) == "not told apart"
    assert math.isnan(found.low)


@pytest.mark.parametrize("value", [0.1, 0.7, 0.9])
def test_equal_values_are_not_told_apart_whatever_their_number(value: float) -> None:
    for n, m in itertools.product(range(1, 14), repeat=2):
        arms = compare_arms([[value] * 20] * n, [[value] * 20] * m, paired=True)
        runs = compare_arms([[value] * n] * 6, [[value] * m] * 6, paired=False, crossed=False)
        prompts = compare_means([value] * (n + 5), [value] * (m + 5), paired=False)
        for found in (arms, runs, prompts):
            assert (found.delta, found.verdict(higher_is_better=True)) == (0.0, "not told apart"), (n, m)


@pytest.mark.parametrize("paired_seeds", [True, False])
def test_the_interval_covers_other_seeds_and_prompts(paired_seeds: bool) -> None:
    stream, hits, rounds = random.Random(1), 0, 600
    for _ in range(rounds):
        prompts = [stream.gauss(0, 1) for _ in range(24)]
        arms = []
        for shift in (0.0, 0.5):
            own = [p + stream.gauss(shift, 0.5) for p in prompts]
            seeds = [stream.gauss(0, 0.1) for _ in range(3)]
            arms.append([[p + seed + stream.gauss(0, 0.5) for p in own] for seed in seeds])
        found = compare_arms(*arms, paired=True, paired_seeds=paired_seeds)
        hits += found.low <= 0.5 <= found.high
    assert 0.93 <= hits / rounds <= 0.98


def test_mean_of_an_arm() -> None:
    # runs 1 and 3, prompts 1.5 and 2.5, no noise: V = 2/2 + 0.5/2, one degree each
    mean, low, high = mean_of_arm([[0.5, 1.5], [2.5, 3.5]])
    assert (mean, high - mean) == (pytest.approx(2.0), pytest.approx(12.7062 * math.sqrt(1.25), rel=1e-4))
    assert mean - low == pytest.approx(high - mean)
    # one run: Student's of its prompts, t(3) = 3.1824
    mean, low, high = mean_of_arm([[0.0, 1.0, 2.0, math.nan, 3.0]])
    assert high - mean == pytest.approx(3.1824 * math.sqrt(5 / 3 / 4), rel=1e-4)
    assert math.isnan(mean_of_arm([[0.5, 0.5]])[1])
    assert math.isnan(mean_of_arm([[math.nan]])[0])
    assert mean_of_arm([[1, 2], [3, 4, 5]], crossed=False)[0] == pytest.approx(2.75)
