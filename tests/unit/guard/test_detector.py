"""The screen against ``design/algorithms.md`` section c.1: false alarms and delays on binomial metrics.

400 replicas: a rate of 0.10 has a standard error of 0.015, a median delay of 8 evaluations about 0.3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

import numpy as np
import pytest

from multitask_rl.guard.watched_metric import DetectorSettings, RegressionDetector

NUM_EVALUATIONS = 200
PLANT = 100
REPLICAS = 400
SETTINGS = DetectorSettings(drop=0.15)


def _rates(level: float, *, drop: float = 0.0, ramp: int = 0, rising: bool = False) -> np.ndarray:
    """[200] success probability: a plateau, or a rise to it, falling by ``drop`` from evaluation 100 on."""
    t = np.arange(NUM_EVALUATIONS)
    rates = level - 0.25 * np.exp(-t / 40) if rising else np.full(NUM_EVALUATIONS, level)
    fallen = np.clip((t - PLANT + (ramp == 0)) / max(ramp, 1), 0, 1)
    return rates * (1 - drop * fallen)


def _alarms(rates: np.ndarray, n: int, *, settings: DetectorSettings = SETTINGS, seed: int = 0) -> list[int]:
    """Return the first alarm of each replica, 200 = none."""
    streams = np.random.default_rng(seed).binomial(n, rates, size=(REPLICAS, NUM_EVALUATIONS)) / n
    return [_first_alarm(stream.tolist(), n, settings) for stream in streams]


def _first_alarm(means: Sequence[float], n: int, settings: DetectorSettings) -> int:
    detector = RegressionDetector()
    for step, mean in enumerate(means):
        detector.observe(mean, math.sqrt(max(mean * (1 - mean), 0.02) / n), step, settings)
        if detector.alarms(settings):
            return step
    return NUM_EVALUATIONS


@pytest.mark.parametrize(("level", "rising"), [(0.6, False), (0.6, True), (0.9, False)])
def test_clean_runs_of_256_prompts_hardly_ever_alarm(level: float, rising: bool) -> None:
    """c.1: 0.000. At most 2 of 400 allows a true rate of 0.001 with 99 % certainty."""
    alarms = _alarms(_rates(level, rising=rising), 256)
    assert sum(a < NUM_EVALUATIONS for a in alarms) <= 2


def test_clean_runs_of_64_prompts_seldom_alarm() -> None:
    """0.025 flat, 0.0025 rising: falls of less than two standard errors are left to larger evaluations."""
    flat = sum(a < NUM_EVALUATIONS for a in _alarms(_rates(0.6), 64)) / REPLICAS
    rising = sum(a < NUM_EVALUATIONS for a in _alarms(_rates(0.6, rising=True), 64)) / REPLICAS
    assert flat < 0.05
    assert rising < 0.015


@pytest.mark.parametrize(
    ("drop", "ramp", "expected"),
    [(0.10, 0, (6, 9)), (0.20, 0, (1, 2)), (0.40, 0, (0, 0)), (0.30, 15, (7, 9))],
)
def test_falls_are_found_with_the_delays_of_the_design(
    drop: float, ramp: int, expected: tuple[int, int]
) -> None:
    """c.1, n = 256: detection 1.0 with median delays 7 / 1-2 / 0 / 8-10 (its ramp starts one later)."""
    alarms = _alarms(_rates(0.6, drop=drop, ramp=ramp), 256)
    found = [a - PLANT for a in alarms if PLANT <= a < NUM_EVALUATIONS]
    early = sum(a < PLANT for a in alarms)
    assert len(found) >= 0.99 * (REPLICAS - early)
    assert expected[0] <= median(found) <= expected[1]


def test_an_abrupt_fall_by_a_fifth_is_found_within_five_evaluations() -> None:
    alarms = _alarms(_rates(0.6, drop=0.2), 256)
    found = [a for a in alarms if PLANT <= a <= PLANT + 5]
    assert len(found) >= 0.95 * REPLICAS


def test_a_rule_against_the_best_value_alarms_in_every_clean_run() -> None:
    """Why there is a ratchet: the literal rule ``x < 0.85 * best`` of the reference (c.1: 1.00)."""
    streams = np.random.default_rng(0).binomial(256, 0.6, size=(REPLICAS, NUM_EVALUATIONS)) / 256
    best = np.maximum.accumulate(streams, axis=1)
    assert (streams[:, 1:] < 0.85 * best[:, :-1]).any(axis=1).mean() > 0.98


def test_watching_eight_metrics_keeps_the_false_alarms_of_one() -> None:
    eight = DetectorSettings(drop=0.15, num_metrics=8)
    single = sum(a < NUM_EVALUATIONS for a in _alarms(_rates(0.6), 64)) / REPLICAS
    each = sum(a < NUM_EVALUATIONS for a in _alarms(_rates(0.6), 64, settings=eight)) / REPLICAS
    assert each * 8 < single + 0.06  # two standard errors of 8 * each at 0.0125


def test_about_one_clean_evaluation_in_twenty_is_not_judged_good() -> None:
    means = np.random.default_rng(3).binomial(256, 0.6, size=(50, NUM_EVALUATIONS)) / 256
    good = []
    for stream in means.tolist():
        detector = RegressionDetector()
        for step, mean in enumerate(stream):
            detector.observe(mean, math.sqrt(mean * (1 - mean) / 256), step, SETTINGS)
            good.append(detector.is_good(SETTINGS))
    assert 0.92 < sum(good) / len(good) < 0.98


def test_cusum_equals_hand_computed_values() -> None:
    """Reference 0.6 with error 0.03 throughout: k = 0.5 * 0.15 * 0.6 / 0.03 = 1.5."""
    detector = RegressionDetector(count=20, average=0.6, average_weight=0.05, variance=0.0009, bound=0.6)
    settings = DetectorSettings(drop=0.15, limit=4.0)
    seen = []
    for step, value in enumerate((0.6, 0.54, 0.51, 0.60, 0.45)):
        detector.observe(value, 0.03, step, settings)
        seen.append(detector.cusum)
    assert seen == pytest.approx([0.0, 0.5, 2.0, 0.5, 4.0])
    assert detector.slack == pytest.approx(1.5)
    assert detector.good_step == 0
    assert not detector.alarms(settings)
    detector.observe(0.554, 0.03, 5, settings)
    assert detector.cusum == pytest.approx(4.0 + 0.046 / 0.03 - 1.5)
    assert detector.alarms(settings)


def test_absolute_delta_is_in_the_metrics_unit() -> None:
    settings = DetectorSettings(drop=0.2, absolute=True)
    detector = RegressionDetector(count=20, average=0.6, average_weight=0.05, variance=0.0009, bound=0.6)
    detector.observe(0.6, 0.03, 0, settings)
    assert detector.slack == pytest.approx(0.5 * 0.2 / 0.03)


def test_reference_is_demonstrated_not_the_best_seen() -> None:
    detector = RegressionDetector()
    for step, value in enumerate([0.5] * 20 + [0.9]):
        detector.observe(value, 0.03, step, SETTINGS)
    assert detector.bound < 0.56  # one lucky evaluation moves the average by a twentieth


def test_state_round_trip_continues_identically() -> None:
    values = np.random.default_rng(1).binomial(256, 0.5, size=60) / 256
    whole = RegressionDetector()
    fresh = RegressionDetector(**json.loads(json.dumps(asdict(whole))))
    assert fresh == whole
    for step, value in enumerate(values.tolist()):
        if step == 30:
            whole = RegressionDetector(**json.loads(json.dumps(asdict(whole))))
        whole.observe(value, 0.03, step, SETTINGS)
        fresh.observe(value, 0.03, step, SETTINGS)
    assert fresh == whole
