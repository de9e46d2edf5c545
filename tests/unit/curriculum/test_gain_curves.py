"""Schedulers on stub tasks whose gain curves are known: what prompts buy, without a model.

A task with ``n`` informative groups behind it is solved with ``p = 1 - (1 - p0) * exp(-n / tau)``; a group of
8 rollouts is informative unless all or none of them solve it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.records import TaskStats

STARTS = {"fast": 0.5, "medium": 0.25, "slow": 0.06}
TAUS = {"fast": 300.0, "medium": 800.0, "slow": 2500.0}
GROUP = 8


def _train(policy: str, *, seed: int, steps: int = 600, **config: float) -> dict[str, list[float]]:
    """Return the probability of success per task before every step."""
    scheduler = DynamicTaskWeightScheduler(policy=policy, **config)  # type: ignore[arg-type]
    scheduler.bind(list(STARTS), targets=dict.fromkeys(STARTS, 0.95))
    stream, practice = np.random.default_rng(seed), dict.fromkeys(STARTS, 0.0)
    curves: dict[str, list[float]] = {task: [] for task in STARTS}
    for step in range(steps):
        stats = {}
        for task, n in scheduler.quotas(32).items():
            p = 1 - (1 - STARTS[task]) * math.exp(-practice[task] / TAUS[task])
            solved = stream.binomial(GROUP, p, size=n)
            informative = int(((solved > 0) & (solved < GROUP)).sum())
            practice[task] += informative
            curves[task].append(p)
            if n:
                rate = solved / GROUP
                std = float(np.sqrt(rate * (1 - rate)).mean())
                stats[task] = TaskStats(
                    task=task, num_prompts=n, num_informative=informative, reward_mean=float(rate.mean()),
                    reward_std=std,
                )  # fmt: skip
        scheduler.update(stats, step)
    return curves


def _steps_until_all(curves: dict[str, list[float]], level: float) -> int:
    worst = np.min(list(curves.values()), axis=0)
    return int(np.argmax(worst >= level)) if (worst >= level).any() else len(worst)


@pytest.mark.parametrize(
    ("policy", "ratio"), [("deficit_learnability", 0.75), ("mt_grpo", 0.75), ("straggler", 0.85)]
)
def test_worst_task_reaches_its_level_sooner_than_under_uniform_weights(policy: str, ratio: float) -> None:
    for seed in range(3):
        uniform = _steps_until_all(_train("uniform", seed=seed), 0.5)
        assert uniform < 600
        assert _steps_until_all(_train(policy, seed=seed), 0.5) <= ratio * uniform


def test_the_default_is_not_worse_than_uniform_on_the_mean_either() -> None:
    for seed in range(3):
        means = {
            p: np.mean([c[-1] for c in _train(p, seed=seed).values()])
            for p in ("uniform", "deficit_learnability")
        }
        assert means["deficit_learnability"] > means["uniform"]


def test_the_literal_patience_rule_starves_the_slow_task() -> None:
    """The negative control: a plateau below the target lowers the weight where it should raise it."""
    for seed in range(3):
        uniform = _steps_until_all(_train("uniform", seed=seed), 0.5)
        literal = _train("patience", seed=seed, patience=10, literal=True, prior_prompts=0)
        assert _steps_until_all(literal, 0.5) > 1.3 * uniform
        assert _steps_until_all(_train("patience", seed=seed, patience=10), 0.5) < uniform
