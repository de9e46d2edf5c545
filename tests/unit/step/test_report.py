"""The numbers of a step: a rate is told only where there was time to measure it over."""

from __future__ import annotations

import math

import pytest

from multitask_rl.records import Direction, Scored, TaskStats
from multitask_rl.step.metrics import StepReport, aggregate, logged, some_of_each, step_numbers
from multitask_rl.testing import make_rollout

NAN = math.nan
DRAWN = [Scored(rollout=make_rollout("ab"), reward=1.0) for _ in range(8)]


@pytest.mark.parametrize(
    ("seconds", "rate"),
    [({"rewards": 1e-9}, None), ({"rewards": 0.0}, None), ({}, None), ({"rewards": 0.5}, 16.0)],
)
def test_rewards_that_took_no_time_have_no_rate(tmp_path, seconds, rate):
    report = StepReport(step=3, quotas={"a": 2}, drawn=DRAWN, kept=DRAWN, seconds={"step": 2.0, **seconds})
    numbers = step_numbers(report, {})
    assert numbers.get("time/rewards_per_s") == rate
    assert (numbers["time/samples_per_s"], numbers["time/tokens_per_s"]) == (4.0, 8.0)


def test_the_mean_over_tasks_leaves_out_those_without_a_range_if_others_have_one():
    per_task = {"sums": {"eval": 0.5}, "code": {"eval": 0.25}, "chat": {"eval": -7.0}}
    directions = dict.fromkeys(per_task, Direction.higher)
    assert aggregate(per_task, "eval", directions, ["sums", "code"])["macro/eval"] == 0.375
    assert aggregate(per_task, "eval", directions, ["sums", "code"])["worst/eval"] == 0.25
    assert aggregate(per_task, "eval", directions)["macro/eval"] == pytest.approx(-6.25 / 3)


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


def test_rates_of_a_task_and_of_the_step(tmp_path):
    drawn = [
        Scored(rollout=make_rollout("x" * length, task=task), reward=1.0)
        for task, length in (("a", 2), ("a", 6), ("b", 4))
    ]
    tokens = {t: sum(len(s.rollout.response_ids) for s in drawn if s.rollout.task == t) for t in "ab"}
    longest = max(len(s.rollout.response_ids) for s in drawn)
    report = StepReport(
        step=0,
        quotas={"a": 2, "b": 1},
        drawn=drawn,
        kept=drawn,
        seconds={"step": 2.0, "rollout": 0.5},
        train={"loss": 1.0, "updates": 4.0},
    )
    own = {"num_prompts": 1, "num_informative": 1, "reward_mean": 1.0}
    stats = {
        "a": TaskStats(task="a", metrics={"reward_s/one": 0.3, "reward_s/two": 0.1, "kl": 0.02}, **own),
        "b": TaskStats(task="b", metrics={"reward_s/one": 1e-6}, **own),
    }
    numbers = step_numbers(report, stats)
    assert numbers["task/a/tokens_per_s"] == tokens["a"] / 2
    assert numbers["task/b/tokens_per_s"] == tokens["b"] / 2
    assert numbers["task/a/rewards_per_s"] == pytest.approx(2 / 0.4)
    assert "task/b/rewards_per_s" not in numbers, "a millionth of a second is no time to measure a rate over"
    assert numbers["time/updates_per_s"] == 2.0
    assert numbers["time/token_latency_s"] == 0.5 / longest


def test_speeds_of_sampling_and_scoring_leave_out_the_given_answers_of_sft():
    given = make_rollout("x" * 40, task="sft")
    given.prompt.given_ids = list(given.response_ids)
    drawn = [*DRAWN, Scored(rollout=given, reward=None)]
    seconds = {"step": 2.0, "rollout": 0.5, "rewards": 0.5}
    report = StepReport(step=0, quotas={"a": 2, "sft": 1}, drawn=drawn, kept=drawn, seconds=seconds)
    numbers = step_numbers(report, {})
    assert (numbers["time/samples_per_s"], numbers["time/tokens_per_s"]) == (4.0, 8.0)
    assert (numbers["time/rewards_per_s"], numbers["time/token_latency_s"]) == (16.0, 0.25)


@pytest.mark.parametrize(("number", "expected"), [(100, 100), (101, 8)])
def test_a_step_of_many_tasks_logs_the_tasks_that_have_samples(number, expected):
    counts = {f"task_{i}": i if i < 9 else 0 for i in range(number)}
    stats = {
        t: TaskStats(task=t, num_prompts=n, num_informative=0, reward_mean=0.5) for t, n in counts.items()
    }
    assert len(logged(stats)) == expected


def test_what_a_step_could_not_measure_of_a_task_is_no_zero_and_in_no_mean():
    """``none`` had no prompts; ``single`` has one response per prompt, so no deviation within a group."""
    stats = {
        "two": TaskStats(task="two", num_prompts=4, num_informative=2, reward_mean=0.5, reward_std=0.4),
        "single": TaskStats(task="single", num_prompts=4, num_informative=4, reward_mean=0.5, reward_std=NAN),
        "none": TaskStats(task="none", num_prompts=0, num_informative=0, reward_mean=NAN, reward_std=NAN),
    }
    report = StepReport(step=0, quotas={"two": 4, "single": 4}, drawn=[], kept=[], seconds={"step": 1.0})
    numbers = step_numbers(report, stats)
    assert numbers["macro/reward_std"] == 0.4
    assert numbers["macro/informative_rate"] == 0.75
    told = {key for key, value in numbers.items() if math.isfinite(value)}
    assert "task/two/reward_std" in told
    assert not told & {"task/single/reward_std", "task/none/reward_std", "task/none/informative_rate"}
