"""Shares are in proportion to the weights and move with what has been seen, on comparable scales."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.records import Direction, TaskStats
from multitask_rl.statistics.intervals import summarise

TAC = "multitask_rl.curriculum.tac:TAC"
ADAPTIVE = ("patience", "deficit_learnability", "straggler", "mt_grpo", "learnability", "bandit", TAC)
BY_LEVEL = tuple(policy for policy in ADAPTIVE if policy != "patience")
"""``patience`` counts steps since a rise, which chance spreads between equal tasks."""
GROUP = 8
PRIOR_PROMPTS = 20
"""The default of ``prior_prompts``."""


def _bound(weights: Mapping[str, float], *, policy: str, declared: bool = True) -> DynamicTaskWeightScheduler:
    scheduler = DynamicTaskWeightScheduler(weights, policy=policy)
    scheduler.bind(list(weights), reward_ranges=dict.fromkeys(weights, (0.0, 1.0)) if declared else None)
    return scheduler


def _sampled(task: str, rates: Sequence[float], stream: random.Random, scale: float = 1.0) -> TaskStats:
    """Groups of eight 0/1 rewards times ``scale``, one prompt for each of ``rates``."""
    solved = [sum(stream.random() < p for _ in range(GROUP)) for p in rates]
    spreads = [(k / GROUP * (1 - k / GROUP)) ** 0.5 for k in solved]
    return TaskStats(
        task=task,
        num_prompts=len(rates),
        num_informative=sum(0 < k < GROUP for k in solved),
        reward_mean=scale * sum(solved) / GROUP / len(rates),
        reward_std=scale * sum(spreads) / len(rates),
        lowest=sorted(scale * (k == GROUP) for k in solved)[:3],
        highest=sorted((scale * (k > 0) for k in solved), reverse=True)[:3],
    )


def _drive(
    scheduler: DynamicTaskWeightScheduler,
    levels: Mapping[str, float],
    steps: int,
    *,
    prompts: int = 12,
    seed: int = 0,
    scales: Mapping[str, float] | None = None,
) -> list[dict[str, float]]:
    """Return the shares after every step on tasks that stand at ``levels``."""
    stream, shares = random.Random(seed), []
    for step in range(steps):
        quotas = scheduler.quotas(prompts)
        stats = {
            t: _sampled(t, [levels[t]] * n, stream, (scales or {}).get(t, 1.0))
            for t, n in quotas.items()
            if n
        }
        scheduler.update(stats, step)
        shares.append(scheduler.weights())
    return shares


@pytest.mark.parametrize("policy", ADAPTIVE)
@pytest.mark.parametrize("weights", [(1, 2, 1), (1, 1, 4)])
def test_at_equal_levels_shares_equal_the_weights(policy: str, weights: tuple[int, ...]) -> None:
    given = dict(zip("abc", weights, strict=True))
    scheduler = _bound(given, policy=policy)
    for step in range(300):
        quotas = scheduler.quotas(12)
        same: dict[str, Any] = {"reward_mean": 0.4, "reward_std": 0.3}
        scheduler.update(
            {t: TaskStats(task=t, num_prompts=n, num_informative=n, **same) for t, n in quotas.items() if n},
            step,
        )
        for task, share in scheduler.weights().items():
            assert share == pytest.approx(given[task] / sum(weights), abs=0.02)


@pytest.mark.parametrize("policy", BY_LEVEL)
def test_noise_at_equal_levels_moves_shares_little(policy: str) -> None:
    off = []
    for seed in range(3):
        for shares in _drive(
            _bound({"a": 1, "b": 2, "c": 1}, policy=policy), dict.fromkeys("abc", 0.4), 300, seed=seed
        ):
            off.append(max(abs(shares[t] - share) for t, share in (("a", 0.25), ("b", 0.5), ("c", 0.25))))
    assert sum(off) / len(off) < 0.02


def test_noise_of_small_evaluations_moves_shares_little() -> None:
    off = []
    for seed in range(4):
        scheduler, stream = (
            _bound(dict.fromkeys("abc", 1.0), policy="deficit_learnability"),
            random.Random(seed),
        )
        for step in range(0, 300, 10):
            _drive(scheduler, dict.fromkeys("abc", 0.4), 10, seed=1000 * seed + step)
            held_out = {t: sum(stream.random() < 0.4 for _ in range(24)) / 24 for t in "abc"}
            scheduler.calibrate(held_out, step, errors=dict.fromkeys("abc", 0.1))
            off.append(max(abs(share - 1 / 3) for share in scheduler.weights().values()))
    assert sum(off) / len(off) < 0.02


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_few_prompts_move_shares_no_further_than_they_are_certain(policy: str) -> None:
    scheduler = _bound(dict.fromkeys("abc", 1.0), policy=policy)
    seen = dict.fromkeys("abc", 0)
    stream = random.Random(1)
    for step in range(25):
        quotas = scheduler.quotas(12)
        rates = {"a": 0.0, "b": 1.0, "c": 1.0}
        scheduler.update({t: _sampled(t, [rates[t]] * n, stream) for t, n in quotas.items() if n}, step)
        for task, share in scheduler.weights().items():
            seen[task] += quotas[task]
            floor = 0.2 / 3
            assert abs(share - 1 / 3) <= (1 - floor) * seen[task] / (seen[task] + PRIOR_PROMPTS)


def test_a_task_that_was_hardly_seen_keeps_its_share_beside_well_known_ones() -> None:
    scheduler = _bound(dict.fromkeys("abc", 1.0), policy="deficit_learnability")
    stream = random.Random(1)
    for step in range(60):
        scheduler.update({t: _sampled(t, [p] * 16, stream) for t, p in (("a", 0.1), ("b", 0.9))}, step)
    scheduler.update({"c": _sampled("c", [0.0] * 4, stream)}, 60)
    shares = scheduler.weights()
    assert shares["c"] == pytest.approx(1 / 3, abs=4 / (4 + PRIOR_PROMPTS))
    assert shares["a"] > 0.5


@pytest.mark.parametrize("policy", ["deficit_learnability", "mt_grpo"])
def test_the_worst_task_gets_most_of_what_is_free_once_that_is_clear(policy: str) -> None:
    shares = _drive(_bound(dict.fromkeys("abc", 1.0), policy=policy), {"a": 0.3, "b": 0.6, "c": 0.6}, 150)
    assert shares[20]["a"] > 0.34
    assert shares[-1]["a"] > 0.7


@pytest.mark.parametrize("policy", BY_LEVEL)
def test_the_same_task_on_three_undeclared_scales_gets_equal_shares_and_the_user_is_told(policy: str) -> None:
    scales = {"large": 3.0, "unit": 1.0, "small": 0.1}
    scheduler = _bound(dict.fromkeys(scales, 1.0), policy=policy, declared=False)
    (warning,) = [e for e in scheduler.update({}, 0) if e.kind == "warn"]
    assert all(task in warning.reason for task in scales)
    assert "low and high" in warning.reason
    for shares in _drive(scheduler, dict.fromkeys(scales, 0.5), 200, scales=scales):
        assert shares == pytest.approx(dict.fromkeys(scales, 1 / 3), abs=0.15)
    assert shares == pytest.approx(dict.fromkeys(scales, 1 / 3), abs=0.05)
    declared = _bound(dict.fromkeys(scales, 1.0), policy=policy).update({}, 0)
    assert not [e for e in declared if e.kind == "warn"]


def test_the_shown_range_places_rewards_and_outliers_do_not_set_it() -> None:
    scheduler = _bound({"a": 1.0, "b": 1.0}, policy="deficit_learnability", declared=False)
    stream = random.Random(0)
    for step in range(60):
        a, b = ([stream.gauss(m, 1.0) for _ in range(8)] for m in (-2.0, -2.0))
        if step in (20, 40):
            b[0] = 1000.0
        scheduler.update({"a": _continuous("a", a), "b": _continuous("b", b)}, step)
    numbers = scheduler.metrics()
    assert numbers["task/a/level"] == pytest.approx(0.45, abs=0.1)
    assert numbers["task/b/level"] == pytest.approx(numbers["task/a/level"], abs=0.1)


def _continuous(task: str, rewards: list[float]) -> TaskStats:
    ordered = sorted(rewards)
    return TaskStats(
        task=task, num_prompts=len(rewards), num_informative=len(rewards), lowest=ordered[:3],
        highest=ordered[::-1][:3], reward_mean=sum(sorted(rewards)[:-1]) / (len(rewards) - 1), reward_std=1.0,
    )  # fmt: skip


def test_the_range_of_the_reward_is_not_that_of_another_metric() -> None:
    scheduler = DynamicTaskWeightScheduler(metric_key="accuracy")
    scheduler.bind(["a"], reward_ranges={"a": (-1.0, 1.0)})
    stats = TaskStats(task="a", num_prompts=8, num_informative=8, reward_mean=-1.0, metrics={"accuracy": 0.5})
    scheduler.update({"a": stats}, 0)
    assert scheduler.metrics()["task/a/level"] == 0.5


def test_a_metric_that_should_fall_is_turned() -> None:
    scheduler = DynamicTaskWeightScheduler(metric_key="violation_rate")
    scheduler.bind(["a"])
    rate = summarise([0.0, 0.0, 0.0, 1.0], direction=Direction.lower, low=0.0, high=1.0)
    numbers = {"metrics": {"violation_rate": 0.25}, "statistics": {"violation_rate": rate}}
    stats = TaskStats(task="a", num_prompts=4, num_informative=4, reward_mean=0.0, **numbers)
    scheduler.update({"a": stats}, 0)
    assert scheduler.metrics()["task/a/level"] == 0.75


@pytest.mark.parametrize(("direction", "value", "level"), [("higher", 4.0, 0.4), ("lower", 4.0, 0.6)])
def test_the_level_of_another_metric_is_its_place_in_the_range_that_it_declares(
    direction: str, value: float, level: float
) -> None:
    scheduler = DynamicTaskWeightScheduler(metric_key="reward/points")
    scheduler.bind(["a"])
    points = summarise([value, value], direction=Direction(direction), low=0.0, high=10.0)
    numbers = {"metrics": {"reward/points": value}, "statistics": {"reward/points": points}}
    stats = TaskStats(task="a", num_prompts=2, num_informative=2, reward_mean=value, **numbers)
    scheduler.update({"a": stats}, 0)
    assert scheduler.metrics()["task/a/level"] == pytest.approx(level)
    resumed = DynamicTaskWeightScheduler(metric_key="reward/points")
    resumed.bind(["a"])
    resumed.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    assert resumed.metrics()["task/a/level"] == pytest.approx(level)


@pytest.mark.parametrize("policy", ["learnability", "tac"])
@pytest.mark.parametrize("is_declared", [True, False])
def test_beside_another_metric_the_spread_is_a_part_of_the_range_of_the_reward(
    policy: str, is_declared: bool
) -> None:
    """Both tasks have the same rewards, in another unit."""
    units = {"small": 1.0, "large": 10.0}
    scheduler = DynamicTaskWeightScheduler(policy=policy, metric_key="accuracy")
    scheduler.bind(list(units))
    for step in range(30):
        found = {
            task: TaskStats(
                task=task,
                num_prompts=8,
                num_informative=8,
                reward_mean=0.5 * unit,
                reward_std=0.3 * unit,
                lowest=[0.0] * 3,
                highest=[unit] * 3,
                reward_range=(0.0, unit) if is_declared else None,
                metrics={"accuracy": 0.5},
            )
            for task, unit in units.items()
        }
        scheduler.update(found, step)
        resumed = DynamicTaskWeightScheduler(policy=policy, metric_key="accuracy")
        resumed.bind(list(units))
        resumed.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
        scheduler = resumed
    assert scheduler.weights() == pytest.approx({"small": 0.5, "large": 0.5})


def test_steps_without_a_reward_lower_the_share_of_informative_groups_as_after_a_resume() -> None:
    """Rewards of ``a`` fail from step 30 on: its groups teach nothing."""

    def bound() -> DynamicTaskWeightScheduler:
        found = DynamicTaskWeightScheduler(policy="deficit_learnability")
        found.bind(["a", "b", "c"], reward_ranges=dict.fromkeys("abc", (0.0, 1.0)))
        return found

    scheduler = bound()
    for step in range(60):
        rewards = {"a": 0.2 if step < 30 else math.nan, "b": 0.5, "c": 0.8}
        found = {
            task: TaskStats(task=task, num_prompts=8, num_informative=8 * (reward > 0.0), reward_mean=reward)
            for task, reward in rewards.items()
        }
        scheduler.update(found, step)
        shares = scheduler.weights()
        resumed = bound()
        resumed.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
        assert resumed.weights() == pytest.approx(shares), step
