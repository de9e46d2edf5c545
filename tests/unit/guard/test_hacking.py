from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from multitask_rl.guard.decision import GuardAction
from multitask_rl.guard.hacking import HackingDetector, Observation, StepHistory, kendall_score
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.guard.settings import SafetyGuardConfig
from multitask_rl.records import Event, TaskStats
from multitask_rl.statistics.definitions import SAMPLING
from multitask_rl.testing import make_evaluation


def _observe(
    monitor: HackingDetector, rewards: list[float], values: list[float], error: float = 0.02
) -> list[Event]:
    points = [Observation(train_reward=r, value=v, error=error) for r, v in zip(rewards, values, strict=True)]
    return [event for step, point in enumerate(points) for event in monitor.observe("a", point, step)]


def test_kendall_score_counts_rising_minus_falling_pairs() -> None:
    assert kendall_score([1, 2, 3, 4]) == 6
    assert kendall_score([4, 3, 2, 1]) == -6
    assert kendall_score([1, 1, 2]) == 2


def test_reward_up_and_ability_down_is_hacking_said_once() -> None:
    up, down = [0.1 * i for i in range(10)], [0.6 - 0.03 * i for i in range(10)]
    events = _observe(HackingDetector(SafetyGuardConfig()), up, down)
    assert [e.kind for e in events] == ["hacking"]
    assert events[0].step == 7
    assert "0.000 -> 0.700" in events[0].reason


@pytest.mark.parametrize(
    ("rewards", "values"),
    [
        ([0.1 * i for i in range(20)], [0.3 + 0.02 * i for i in range(20)]),  # both rise: learning
        ([0.9 - 0.04 * i for i in range(20)], [0.6 - 0.03 * i for i in range(20)]),  # both fall: forgetting
        ([0.5] * 20, [0.6 - 0.03 * i for i in range(20)]),
    ],
)
def test_anything_else_is_not(rewards: list[float], values: list[float]) -> None:
    assert _observe(HackingDetector(SafetyGuardConfig()), rewards, values) == []


def test_overfitting_plateaus_are_hardly_ever_called_hacking() -> None:
    """Rising training reward over a held-out plateau, 100 runs of 100 noisy evaluations: at most 5 alarms."""
    stream = np.random.default_rng(0)
    alarmed = 0
    for _ in range(100):
        values = (stream.binomial(256, 0.6, size=100) / 256).tolist()
        rewards = [0.5 + 0.004 * i for i in range(100)]
        alarmed += bool(
            _observe(HackingDetector(SafetyGuardConfig()), rewards, values, error=math.sqrt(0.24 / 256))
        )
    assert alarmed <= 5


def test_kl_budget_entropy_collapse_and_length_drift_are_warned_once_each() -> None:
    monitor = HackingDetector(SafetyGuardConfig(kl_budget=10.0))
    unknown = Observation(train_reward=math.nan, value=0.5, error=0.02)
    start = Observation(train_reward=0.5, value=0.5, error=0.02, length=20.0, entropy=1.0, kl=0.0)
    far = Observation(train_reward=0.5, value=0.5, error=0.02, length=70.0, entropy=0.2, kl=12.0)
    events = [e for step, p in enumerate((unknown, start, far, far)) for e in monitor.observe("a", p, step)]
    assert [(e.kind, e.step) for e in events] == [("warn", 2)] * 3
    assert not any(e.reason.startswith(e.task) for e in events), "every view names the task beside the reason"
    text = " ".join(e.reason for e in events)
    assert "12.00 nats per response, over its budget of 10" in text
    assert "from 1.000 to 0.200 nats" in text
    assert "from 20.0 to 70.0 tokens" in text


def test_a_trained_task_without_samples_for_two_evaluations_is_starved_said_once() -> None:
    def seen(per_step: list[float]) -> list[tuple[str, int]]:
        monitor = HackingDetector(SafetyGuardConfig())
        points = [Observation(train_reward=0.5, value=0.5, error=0.02, prompts=n) for n in per_step]
        return [(e.kind, e.step) for step, p in enumerate(points) for e in monitor.observe("a", p, step)]

    assert seen([4.0, 0.0, 0.0, 0.0]) == [("starved", 2)]
    assert seen([4.0, 0.0, 0.5, 0.0, 2.0]) == []  # a small share leaves gaps
    assert seen([0.0, 0.0, 0.0]) == []  # a task of weight 0 never was in training
    assert seen([4.0, math.nan, math.nan]) == []  # frozen by the guard itself, or not trained
    assert seen([4.0, 0.0, 0.0, 1.0, 0.0, 0.0]) == [("starved", 2), ("starved", 5)]


def test_a_task_whose_weight_a_resume_sets_to_0_is_not_called_starved() -> None:
    def kinds(weight: float) -> list[str]:
        guard, events = SafetyGuard(), list[Event]()
        guard.bind(["a", "b"])
        for step in range(60):
            if step % 10 == 0:
                evaluations = {t: make_evaluation([1.0, 0.0] * 50, task=t, step=step) for t in "ab"}
                events += guard.observe(step, evaluations).events
            number, share = (4, 0.5) if step < 20 else (0, weight)
            of_b = {"num_prompts": number, "num_informative": number, "metrics": {"weight": share}}
            of_a = TaskStats(task="a", num_prompts=4, num_informative=4, reward_mean=0.5)
            guard.record_step(step, {"a": of_a, "b": TaskStats(task="b", reward_mean=0.5, **of_b)})
        return [event.kind for event in events if event.task == "b"]

    assert kinds(0.5) == ["starved"]
    assert kinds(0.0) == []


def test_lengths_are_not_compared_with_those_of_another_sampling() -> None:
    """A resume that allows longer responses: what the task measures is redefined, and so is its beginning."""

    def told(sampling: str) -> list[str]:
        guard, events = SafetyGuard(), list[Event]()
        guard.bind(["a"])
        for step in range(60):
            is_changed = step >= 30
            if step % 10 == 0:
                evaluation = make_evaluation([1.0, 0.0] * 50, task="a", step=step)
                own = {SAMPLING: sampling if is_changed else "short"}
                events += guard.observe(step, {"a": replace(evaluation, definitions=own)}).events
            metrics = {"length": 80.0 if is_changed else 10.0}
            of_a = TaskStats(
                task="a", num_prompts=4, num_informative=4, reward_mean=0.5, reward_std=0.1, metrics=metrics
            )
            guard.record_step(step, {"a": of_a})
        return [event.reason for event in events if "responses went from" in event.reason]

    assert told("short") == ["responses went from 10.0 to 80.0 tokens"]
    assert told("long") == []


def test_state_round_trip_continues_identically() -> None:
    stream = random.Random(0)
    whole, resumed = (HackingDetector(SafetyGuardConfig()) for _ in range(2))
    _observe(whole, [stream.random() for _ in range(6)], [0.5] * 6)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())), {"a": "b"})
    rewards, values = [1.0 + 0.1 * i for i in range(8)], [0.5 - 0.05 * i for i in range(8)]
    points = [Observation(train_reward=r, value=v, error=0.02) for r, v in zip(rewards, values, strict=True)]
    for step, point in enumerate(points):
        now, then = whole.observe("a", point, step), resumed.observe("b", point, step)
        assert [e.kind for e in now] == [e.kind for e in then]


def test_the_guard_lowers_the_share_of_a_hacked_task_before_it_is_a_regression() -> None:
    guard = SafetyGuard(threshold_delta=-0.5)
    guard.bind({"a": True, "b": True})
    decisions = []
    for step in range(0, 160):
        if step % 10 == 0:
            level = 0.6 if step < 60 else 0.6 - 0.002 * (step - 60)
            evaluations = {
                t: make_evaluation([1.0] * n + [0.0] * (500 - n), task=t, step=step)
                for t, n in (("a", round(500 * level)), ("b", 350))
            }
            decisions.append(guard.observe(step, evaluations))
        guard.record_step(
            step,
            {
                "a": TaskStats(task="a", num_prompts=8, num_informative=4, reward_mean=0.3 + 0.004 * step),
                "b": TaskStats(task="b", num_prompts=8, num_informative=4, reward_mean=0.5),
            },
        )
    acted = [d for d in decisions if d.action is not GuardAction.keep]
    assert [d.action for d in acted][:1] == [GuardAction.reweight]
    assert acted[0].adjustments.weight_factors == {"a": 0.5}
    assert acted[0].events[0].kind == "hacking"
    assert acted[0].events[0].reason == acted[0].reason
    assert acted[0].reason.endswith("; share of a x 0.5 until a has recovered")


def test_a_curriculum_that_draws_easier_prompts_makes_no_task_its_own_culprit() -> None:
    history = StepHistory(50)
    for step in range(30):
        easier = 0.01 * step  # the ability is the same
        math_task = TaskStats(
            task="math", num_prompts=8, num_informative=2, reward_mean=0.4 + easier, shift=-easier
        )
        chat = TaskStats(task="chat", num_prompts=8, num_informative=6, reward_mean=0.5)
        history.record(step, {"math": math_task, "chat": chat})
    assert history.find_culprit("math", since=[0]) == "chat"


@pytest.mark.parametrize(
    ("rewards", "culprit"),
    [
        ([0.0, 0.667, 0.719, 0.875, 0.938, 0.953, 1.0], "math"),  # flipped rewards in a run of a chat model
        ([0.51, 0.68, 0.573, 0.828, 0.961, 0.938, 1.0], "math"),
        ([0.3, 0.9, *[1.0] * 20], "math"),  # flipped, and soon at its ceiling
        ([0.4, 0.5, 0.45, 0.48, 0.43, 0.52, 0.46], "chat"),
        ([0.5] * 20, "chat"),
        ([0.1, 0.2, 0.3, 0.4], "chat"),  # so few steps rise by chance
        ([0.1 + 0.02 * min(i, 10) - 0.03 * max(0, i - 10) for i in range(20)], "chat"),
    ],
)
def test_a_task_whose_training_reward_rose_is_its_own_culprit_after_a_few_steps(rewards, culprit) -> None:
    history = StepHistory(50)
    for step, reward in enumerate([0.2, *rewards]):  # the step from the last good weights does not count
        math_task = TaskStats(task="math", num_prompts=8, num_informative=2, reward_mean=reward)
        chat = TaskStats(task="chat", num_prompts=8, num_informative=6, reward_mean=0.5)
        history.record(step, {"math": math_task, "chat": chat})
    assert history.find_culprit("math", since=[0]) == culprit


def test_rewards_of_another_definition_make_no_task_its_own_culprit() -> None:
    history = StepHistory(50)
    for step in range(30):
        if step == 15:  # a resume that triples the reward's weight
            history.forget(["math"], "reward")
        math_task = TaskStats(task="math", num_prompts=8, num_informative=2, reward_mean=0.4 + (step >= 15))
        chat = TaskStats(task="chat", num_prompts=8, num_informative=6, reward_mean=0.5)
        history.record(step, {"math": math_task, "chat": chat})
    assert history.find_culprit("math", since=[0]) == "chat"
