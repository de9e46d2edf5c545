from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from multitask_rl.records import Direction
from multitask_rl.statistics.intervals import compare_paired


def test_mcnemar_equals_the_hand_computed_binomial_tail() -> None:
    # 6 prompts got worse, 1 better, 5 stayed: P(X >= 6 | 7, 1/2) = 8/128, half of P(X = 6) off: 4.5/128
    reference = [1] * 6 + [0] + [1] * 5
    current = [0] * 6 + [1] + [1] * 5
    test = compare_paired(current, reference)
    assert test.z == pytest.approx(NormalDist().inv_cdf(1 - 4.5 / 128))
    assert test.drop == pytest.approx(5 / 12)
    assert compare_paired(reference, current).z == pytest.approx(-test.z)


def test_equal_sequences_say_nothing() -> None:
    test = compare_paired([0.0, 1.0, 1.0], [0.0, 1.0, 1.0])
    assert (test.z, test.drop, test.num_prompts) == (0.0, 0.0, 3)


def test_continuous_values_use_the_paired_t_as_a_normal_quantile() -> None:
    # drops .1, .3, .2: mean .2, sd .1, t = .2 / (.1 / sqrt 3) = 3.46 of two degrees: one-sided 3.71 %
    test = compare_paired([0.4, 0.2, 0.3], [0.5, 0.5, 0.5])
    assert test.z == pytest.approx(NormalDist().inv_cdf(1 - 0.0371), abs=1e-3)


def test_direction_turns_the_sign() -> None:
    assert compare_paired([0.4, 0.2], [0.5, 0.6], direction=Direction.lower).z < 0


def test_prompts_that_failed_on_either_side_are_left_out() -> None:
    test = compare_paired([math.nan, 0.2, 0.3, 0.1], [0.5, math.nan, 0.5, 0.4])
    assert test.num_prompts == 2
    assert test.drop == pytest.approx(0.25)


def test_other_prompts_are_compared_as_independent_samples() -> None:
    test = compare_paired([0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0])
    assert test.drop == pytest.approx(0.75 - 1 / 3)
    # t = (3/4 - 1/3) / sqrt((1/3) / 3 + (1/4) / 4) = 1 of two degrees: one-sided 21.13 %
    assert test.z == pytest.approx(NormalDist().inv_cdf(1 - 0.2113), abs=1e-3)


@pytest.mark.parametrize("values", [[], [1.0], [math.nan, math.nan]])
def test_too_little_data_says_nothing(values: list[float]) -> None:
    assert compare_paired(values, values).z == 0.0


def test_a_total_fall_has_a_finite_z() -> None:
    assert compare_paired([0.0] * 1024, [1.0] * 1024).z == 8.0
    assert compare_paired([0.25] * 10, [0.5] * 10).z == 8.0


def test_size_of_the_test_is_what_its_quantile_says() -> None:
    """One-sided at z > 1.64: 5 % of null comparisons, up to three standard errors and discreteness."""
    stream = np.random.default_rng(0)
    null = stream.binomial(1, 0.6, size=(1500, 2, 128)).astype(float)
    rejected = sum(compare_paired(a.tolist(), b.tolist()).z > 1.64 for a, b in null) / 1500
    assert 0.03 < rejected < 0.07
