"""The numbers of a step: a rate is told only where there was time to measure it over."""

from __future__ import annotations

import io

import pytest

from multitask_rl.config.run import TrackingConfig
from multitask_rl.records import Scored
from multitask_rl.step.metrics import StepReport, some_of_each, step_numbers
from multitask_rl.testing import make_rollout
from multitask_rl.tracking.console import ConsoleTracker

DRAWN = [Scored(rollout=make_rollout("ab"), reward=1.0) for _ in range(8)]


@pytest.mark.parametrize(
    ("seconds", "rate"),
    [({"rewards": 1e-9}, None), ({"rewards": 0.0}, None), ({}, None), ({"rewards": 0.5}, 16.0)],
)
def test_rewards_that_took_no_time_have_no_rate(tmp_path, seconds, rate):
    report = StepReport(step=3, quotas={"a": 2}, drawn=DRAWN, kept=DRAWN, seconds={"step": 2.0, **seconds})
    numbers = step_numbers(report, {}, {})
    assert numbers.get("time/rewards_per_s") == rate
    assert (numbers["time/samples_per_s"], numbers["time/tokens_per_s"]) == (4.0, 8.0)
    log = io.StringIO()
    ConsoleTracker(tmp_path, TrackingConfig(), None, stream=log).log_metrics(numbers, 3)
    assert ("rewards/s" in log.getvalue()) == (rate is not None), log.getvalue()


@pytest.mark.parametrize(
    ("number", "kept"),
    [(2, {"a": [0, 1], "b": [0, 1]}), (0, {}), (-1, {"a": list(range(6)), "b": list(range(2))})],
)
def test_rollouts_of_each_task_are_recorded(number, kept):
    drawn = [
        Scored(rollout=make_rollout(task=task, sample=i), reward=1.0)
        for task, size in (("a", 6), ("b", 2))
        for i in range(size)
    ]
    found: dict[str, list[int]] = {}
    for scored in some_of_each(drawn, number):
        found.setdefault(scored.rollout.task, []).append(scored.rollout.sample)
    assert found == kept
