from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.errors import ConfigError, PluginError
from multitask_rl.records import Direction, Event, Statistic, TaskStats

POLICIES = (
    "uniform",
    "static",
    "patience",
    "deficit_learnability",
    "straggler",
    "mt_grpo",
    "learnability",
    "bandit",
    "multitask_rl.curriculum.tac:TAC",
)


def _stats(task: str, reward: float, *, informative: float = 0.5, std: float = 0.3, n: int = 8) -> TaskStats:
    return TaskStats(
        task=task, num_prompts=n, num_informative=round(informative * n), reward_mean=reward, reward_std=std
    )


def _bound(
    tasks: str | list[str] = "abc",
    *,
    policy: str = "deficit_learnability",
    bind: dict[str, Any] | None = None,
    **kw: Any,
) -> DynamicTaskWeightScheduler:
    scheduler = DynamicTaskWeightScheduler(policy=policy, **kw)
    scheduler.bind(list(tasks), **{"reward_ranges": dict.fromkeys(tasks, (0.0, 1.0)), **(bind or {})})
    return scheduler


def _drive(scheduler: DynamicTaskWeightScheduler, steps: int, seed: int = 0, start: int = 0) -> list[Event]:
    stream = random.Random(seed)
    events = []
    for step in range(start, start + steps):
        counts = scheduler.quotas(16)
        stats = {
            t: _stats(t, stream.random() * (1 + i) / len(counts), informative=stream.random(), n=n)
            for i, (t, n) in enumerate(sorted(counts.items()))
            if n
        }
        events += scheduler.update(stats, step)
    return events


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_sum_to_one_and_respect_the_floor_throughout(policy: str) -> None:
    scheduler = _bound(policy=policy, min_weight=0.15)
    for step in range(200):
        _drive(scheduler, 1, seed=step, start=step)
        weights = scheduler.weights()
        assert math.isclose(math.fsum(weights.values()), 1.0)
        assert min(weights.values()) >= 0.15 - 1e-12


@pytest.mark.parametrize("policy", POLICIES)
def test_order_of_tasks_has_no_influence(policy: str) -> None:
    first, second = _bound(["a", "b", "c"], policy=policy), _bound(["c", "a", "b"], policy=policy)
    for step in range(60):
        stats = {t: _stats(t, 0.1 + 0.2 * i + 0.001 * step, informative=0.3 * i) for i, t in enumerate("abc")}
        first.update(stats, step)
        second.update(dict(reversed(stats.items())), step)
        assert first.weights() == pytest.approx(second.weights(), abs=1e-12)
        assert first.quotas(10) == second.quotas(10)


@pytest.mark.parametrize("policy", POLICIES)
def test_state_round_trip_continues_identically(policy: str) -> None:
    settings = {"patience": 5} if policy == "patience" else {}
    whole = _bound(policy=policy, **settings)
    _drive(whole, 120)
    resumed = _bound(policy=policy, **settings)
    resumed.load_state_dict(whole.state_dict())
    assert resumed.weights() == whole.weights()
    for seed in range(50):
        events = [_drive(s, 1, seed=seed, start=120 + seed) for s in (whole, resumed)]
        assert events[0] == [e for e in events[1] if e.kind != "weights"]
        assert whole.weights() == resumed.weights()
        assert whole.state_dict() == resumed.state_dict()


def test_state_is_json_able() -> None:
    scheduler = _bound()
    state = json.loads(json.dumps(scheduler.state_dict(), allow_nan=False))
    other = _bound()
    other.load_state_dict(state)
    _drive(scheduler, 20)
    state = json.loads(json.dumps(scheduler.state_dict(), allow_nan=False))
    other.load_state_dict(state)
    assert other.weights() == scheduler.weights()


def test_resume_survives_added_removed_and_renamed_tasks() -> None:
    old = _bound("abc")
    for step in range(40):
        old.update({t: _stats(t, r) for t, r in zip("abc", (0.9, 0.5, 0.1), strict=True)}, step)
    new = _bound(["b", "z", "new"])
    new.load_state_dict(old.state_dict(), renamed={"c": "z"})
    policy, before = new._policy, old._policy
    assert policy is not None
    assert before is not None
    assert policy.traces["z"].level == before.traces["c"].level == pytest.approx(0.1)
    assert policy.traces["b"].level == before.traces["b"].level == pytest.approx(0.5)
    assert policy.traces["new"].steps == 0
    assert math.isclose(sum(new.weights().values()), 1.0)
    assert sum(new.quotas(10).values()) == 10


def test_what_was_said_once_is_not_said_again_by_a_run_saved_before_its_next_step() -> None:
    told = _bound()
    told.update({}, 0)
    resumed = _bound(bind={"reward_ranges": {}})
    resumed.load_state_dict(told.state_dict())  # an event is new: the scale is estimated
    again = _bound(bind={"reward_ranges": {}})
    again.load_state_dict(resumed.state_dict())
    assert [e.kind for e in resumed.update({}, 1)] == [e.kind for e in again.update({}, 1)] == ["warn"]


def test_a_resume_with_another_task_tells_the_shares_that_it_goes_on_with() -> None:
    old = _bound("ab", prior_prompts=1)
    _drive(old, 20)
    new = _bound("abd", prior_prompts=1)
    new.load_state_dict(old.state_dict())
    shares = new.weights()
    again = _bound("abd", prior_prompts=1)
    again.load_state_dict(new.state_dict())  # saved before it was told
    assert again.update({}, 21)[0].data["to"] == shares
    first, *_ = _drive(new, 1, start=20)
    assert shares != pytest.approx(dict.fromkeys("abd", 1 / 3), abs=0.01)
    assert first.data["to"] == shares
    assert f"by policy deficit_learnability; with the evidence so far a {shares['a']:.3f}, b" in first.reason


def test_state_of_another_policy_is_left_out_and_said() -> None:
    new = _bound(policy="static")
    new.load_state_dict(_bound().state_dict())
    kinds = {e.kind: e.reason for e in new.update({}, 0)}
    assert "deficit_learnability" in kinds["warn"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_single_task_always_gets_everything(policy: str) -> None:
    scheduler = _bound("a", policy=policy)
    _drive(scheduler, 30)
    assert scheduler.weights() == {"a": 1.0}
    assert scheduler.quotas(7) == {"a": 7}


def test_missing_weight_gets_the_mean_of_those_given_and_is_reported() -> None:
    scheduler = _bound("abc", policy="static", initial_weights={"a": 0.5, "b": 0.3})
    assert scheduler.weights() == pytest.approx({"a": 0.5 / 1.2, "b": 0.3 / 1.2, "c": 0.4 / 1.2})
    (event,) = scheduler.update({}, 0)
    assert event.kind == "weights"
    assert event.data["filled"] == ["c"]
    assert event.data["to"] == scheduler.weights()
    assert scheduler.update({}, 1) == []


def test_initial_weights_hold_until_there_are_statistics() -> None:
    scheduler = _bound("ab", initial_weights={"a": 3, "b": 1}, min_weight=0.0)
    assert scheduler.weights() == {"a": 0.75, "b": 0.25}


def test_unknown_task_is_an_error_that_names_the_known_ones() -> None:
    scheduler = DynamicTaskWeightScheduler({"maths": 1.0})
    with pytest.raises(ConfigError, match=r"'maths'.*did you mean 'math'.*allowed: math, code"):
        scheduler.bind(["math", "code"])


def test_floors_above_the_whole_are_an_error_and_the_default_floor_adapts() -> None:
    with pytest.raises(ConfigError, match=r"add up to 1\.2"):
        _bound("abc", min_weight=0.4)
    with pytest.raises(ConfigError, match=r"add up to 1\.1"):
        _bound("ab", bind={"min_shares": {"a": 1.0}})
    many = _bound([f"t{i}" for i in range(20)])
    assert min(many.weights().values()) >= 0.02
    assert _bound("abc")._floors == pytest.approx(dict.fromkeys("abc", 0.2 / 3))
    assert _bound("abc", min_weight=0.1)._floors == dict.fromkeys("abc", 0.1), "a floor that is given is kept"
    exact = _bound("abcd", min_weight=0.25)
    _drive(exact, 20)
    assert exact.weights() == pytest.approx(dict.fromkeys("abcd", 0.25))


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, "much", True])
def test_bad_weight_is_an_error(weight: Any) -> None:
    with pytest.raises(ConfigError, match="weight of task 'a'"):
        DynamicTaskWeightScheduler({"a": weight})


def test_unknown_policy_and_unknown_key_are_errors() -> None:
    with pytest.raises(PluginError, match="deficit_learnability"):
        DynamicTaskWeightScheduler(policy="deficit_learnabilty")
    with pytest.raises(ConfigError, match="smoothing"):
        DynamicTaskWeightScheduler(smothing=0.1)
    with pytest.raises(ConfigError, match="smoothing must be in"):
        DynamicTaskWeightScheduler(smoothing=2.0)


@pytest.mark.parametrize("wrong", ["math.nan", "-1.0", "math.inf", "None", "'absent'"])
def test_a_preference_that_is_no_share_is_an_error_that_names_the_task(tmp_path: Path, wrong: str) -> None:
    text = f"""
import math

from multitask_rl.curriculum.base import SchedulerPolicy


class Own(SchedulerPolicy):
    def _preferences(self):
        given = {{"a": 1.0, "b": {wrong}, "c": 1.0}}
        return {{task: value for task, value in given.items() if value != "absent"}}
"""
    (tmp_path / "own.py").write_text(text)
    scheduler = _bound(policy=f"{tmp_path / 'own.py'}:Own")
    with pytest.raises(PluginError, match=r"Own._preferences gives \{'b': .*\}; allowed: a finite number"):
        scheduler.update({task: _stats(task, 0.5) for task in "abc"}, 0)


@pytest.mark.parametrize("given", ["None", "[1.0, 2.0]"])
def test_preferences_that_are_no_mapping_are_told(tmp_path: Path, given: str) -> None:
    text = f"""
from multitask_rl.curriculum.base import SchedulerPolicy


class Own(SchedulerPolicy):
    def _preferences(self):
        return {given}
"""
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(PluginError, match=r"Own\._preferences returned .*; expected a mapping of tasks to"):
        _bound(policy=f"{tmp_path / 'own.py'}:Own")


def test_a_config_of_a_policy_that_lacks_the_keys_of_all_policies_is_told(tmp_path: Path) -> None:
    text = """
from dataclasses import dataclass

from multitask_rl.curriculum.base import SchedulerPolicy


class Own(SchedulerPolicy):
    @dataclass
    class Config:
        patience: int = 3
"""
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(PluginError, match=r"own\.py:Own\.Config has to extend .*SchedulerPolicyConfig"):
        DynamicTaskWeightScheduler(policy=f"{tmp_path / 'own.py'}:Own")


def test_zero_weight_task_gets_no_prompt_and_does_not_move_the_others() -> None:
    with_zero = _bound("abz", initial_weights={"a": 1, "b": 1, "z": 0})
    without = _bound("ab")
    for step in range(50):
        stats = {t: _stats(t, r) for t, r in (("a", 0.8), ("b", 0.2))}
        with_zero.update(stats, step)
        without.update(stats, step)
        counts = with_zero.quotas(9)
        assert counts["z"] == 0
        assert {t: counts[t] for t in "ab"} == without.quotas(9)


def test_zero_weight_task_with_a_min_share_gets_that_share() -> None:
    scheduler = _bound(
        "az", policy="static", initial_weights={"a": 1, "z": 0}, bind={"min_shares": {"z": 0.25}}
    )
    total: Counter[str] = Counter()
    for _step in range(40):
        total.update(scheduler.quotas(10))
    assert total["z"] == pytest.approx(100, abs=2)
    assert scheduler.active == ("a", "z")
    assert _bound("az", initial_weights={"a": 1, "z": 0}).active == ("a",)


def test_realised_share_over_fifty_steps_is_within_a_prompt_of_the_target() -> None:
    scheduler = _bound(
        "abcde", policy="static", initial_weights=dict(zip("abcde", (5, 3, 2, 1, 1), strict=True))
    )
    total: Counter[str] = Counter()
    for _step in range(50):
        total.update(scheduler.quotas(32))
    for task, weight in scheduler.weights().items():
        assert abs(total[task] / 1600 - weight) < 2 / 1600


def test_nan_and_empty_statistics_change_nothing() -> None:
    scheduler = _bound("ab")
    for step in range(20):
        scheduler.update({"a": _stats("a", 0.9), "b": _stats("b", 0.2)}, step)
    before = scheduler.weights()
    scheduler.update({"a": _stats("a", math.nan), "b": _stats("b", 0.5, n=0)}, 20)
    scheduler.update({}, 21)
    assert scheduler.weights() == before


def test_reweight_event_has_reason_from_and_to_and_does_not_spam() -> None:
    scheduler = _bound("ab")
    events = []
    for step in range(100):
        events += scheduler.update({"a": _stats("a", 0.95), "b": _stats("b", 0.05)}, step)
    reweights = [e for e in events if e.kind == "reweight"]
    assert reweights[0].data["from"] == {"a": 0.5, "b": 0.5}
    assert "0.500 ->" in reweights[0].reason
    assert "level" in reweights[0].reason
    assert reweights[-1].data["to"]["b"] > 0.8
    for before, after in itertools.pairwise(reweights):  # as it becomes certain
        assert after.step - before.step >= 10
        assert after.data["from"] == before.data["to"]
        assert after.data["to"]["b"] - before.data["to"]["b"] >= 0.05


def test_a_share_that_the_guard_moves_is_not_told_as_the_policy_s() -> None:
    scheduler = _bound("ab")
    scheduler.set_factors({"a": 0.0})
    (moved,) = [e for e in scheduler.update({}, 0) if e.kind == "reweight"]
    assert moved.data["to"]["a"] == 0.0
    assert "the guard scales the shares (a x 0)" in moved.reason


def test_unlearnable_task_is_held_at_its_floor_with_an_alarm_and_released() -> None:
    scheduler = _bound("ab", min_weight=0.1)
    events = []
    for step in range(400):
        events += scheduler.update({"a": _stats("a", 0.5), "b": _stats("b", 0.0, informative=0.0)}, step)
    (alarm,) = [e for e in events if e.kind == "alarm"]
    assert alarm.task == "b"
    assert alarm.step == 199  # after 200 steps
    assert scheduler.weights()["b"] == pytest.approx(0.1)
    for step in range(400, 420):
        events += scheduler.update({"a": _stats("a", 0.5), "b": _stats("b", 0.1, informative=0.5)}, step)
    assert [e.task for e in events if e.kind == "release"] == ["b"]
    assert scheduler.weights()["b"] > 0.3


def test_where_every_task_is_held_shares_are_the_weights() -> None:
    scheduler = DynamicTaskWeightScheduler(initial_weights={"a": 3, "b": 1}, min_weight=0.01)
    scheduler.bind("ab")
    for step in range(220):
        dead = {task: _stats(task, 0.1 * (task == "a"), informative=0.0) for task in "ab"}
        scheduler.update(dead, step)
    assert {key for key, held in scheduler.metrics().items() if "held" in key and held} == {
        "task/a/held",
        "task/b/held",
    }
    assert scheduler.weights() == pytest.approx({"a": 0.75, "b": 0.25})


def test_solved_task_without_variance_is_not_called_unlearnable() -> None:
    scheduler = _bound("ab")
    events = []
    for step in range(400):
        events += scheduler.update({"a": _stats("a", 0.5), "b": _stats("b", 0.97, informative=0.0)}, step)
    assert not [e for e in events if e.kind == "alarm"]


def test_a_task_whose_rewards_are_always_one_number_is_told_where_its_costs_still_differ() -> None:
    """Costs make its groups informative, so it does not look unlearnable: only the reward is useless."""
    scheduler, told = _bound("abcd", min_weight=0.1), list[Event]()
    for step in range(420):
        if step == 150:  # what was counted survives a resume
            resumed = _bound("abcd", min_weight=0.1)
            resumed.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
            scheduler = resumed
        level = {"a": 0.5, "b": 0.0, "c": 1.0, "d": 0.3}
        stats = {task: replace(_stats(task, m), lowest=[m] * 3, highest=[m] * 3) for task, m in level.items()}
        stats["a"] = replace(stats["a"], lowest=[0.0], highest=[1.0])
        if step % 150 == 0:
            stats["d"] = replace(stats["d"], highest=[0.4])
        told += [e for e in scheduler.update(stats, step) if e.kind in ("warn", "alarm")]
    (warning,) = told
    assert (warning.task, warning.step) == ("b", 199), "c has reached its target, a and d differ"
    assert "every reward of b has been 0 for 200 steps" in warning.reason
    assert scheduler.metrics()["task/b/held"] == 0.0, "its constraints go on to learn"


def test_guard_factors_scale_freeze_and_come_off() -> None:
    scheduler = _bound("abc", policy="uniform")
    scheduler.set_factors({"a": 0.5, "b": 0.0})
    assert scheduler.weights() == pytest.approx({"a": 1 / 3, "b": 0.0, "c": 2 / 3})
    assert scheduler.quotas(9) == {"a": 3, "b": 0, "c": 6}
    scheduler.set_factors({"a": 0.0, "b": 0.0, "c": 0.0})  # nothing left to train: ignored
    assert scheduler.weights() == pytest.approx(dict.fromkeys("abc", 1 / 3))


def test_a_metric_can_be_watched_instead_of_the_reward_and_its_absence_is_said_once() -> None:
    scheduler = _bound("ab", metric_key="accuracy")

    def stats(task: str, accuracy: float) -> TaskStats:
        return TaskStats(
            task=task, num_prompts=4, num_informative=4, reward_mean=0.0, metrics={"accuracy": accuracy}
        )

    for step in range(60):
        events = scheduler.update({"a": stats("a", 0.9), "b": stats("b", 0.1)}, step)
    assert scheduler.weights()["b"] > 0.8
    typo = _bound("ab", metric_key="accuracyy")
    events = [e for step in range(3) for e in typo.update({"a": stats("a", 0.9)}, step)]
    (warning,) = [e for e in events if e.kind == "warn"]
    assert "did you mean 'accuracy'" in warning.reason
    resumed = _bound("ab", metric_key="accuracyy")
    resumed.load_state_dict(json.loads(json.dumps(typo.state_dict())))
    told = resumed.update({"a": stats("a", 0.9)}, 3)
    assert not [e for e in told if e.kind == "warn"], "told before the checkpoint"


def test_using_it_before_bind_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="bind"):
        DynamicTaskWeightScheduler().weights()


def test_metrics_are_of_the_tasks_that_were_seen() -> None:
    scheduler = _bound("ab", bind={"reward_ranges": {"a": (0.0, 1.0)}})
    scheduler.update({"a": _stats("a", 0.25, informative=0.5)}, 0)
    assert scheduler.metrics() == {"task/a/level": 0.25, "task/a/informative": 0.5, "task/a/held": 0.0}


@pytest.mark.parametrize(("policy", "is_used"), [("patience", True), ("mt_grpo", False), ("static", False)])
def test_a_patience_that_the_policy_does_not_use_is_said(policy: str, is_used: bool) -> None:
    warnings = [e.reason for e in _bound("ab", policy=policy, patience=7).update({}, 0) if e.kind == "warn"]
    assert [w for w in warnings if "patience=7" in w and policy in w] == ([] if is_used else warnings)
    assert bool(warnings) != is_used
    assert not [e for e in _bound("ab", policy=policy).update({}, 0) if e.kind == "warn"]


def test_levels_of_another_metric_are_not_gone_on_with() -> None:
    def stats(task: str, reward: float, rate: float) -> TaskStats:
        statistic = Statistic(mean=rate, n=8, error=0.1, direction=Direction.lower, low=0.0, high=1.0)
        return TaskStats(
            task=task,
            num_prompts=8,
            num_informative=8,
            reward_mean=reward,
            reward_std=1.0,
            lowest=[0.0],
            highest=[10.0],
            metrics={"violation_rate": rate},
            statistics={"violation_rate": statistic},
        )

    def run(scheduler: DynamicTaskWeightScheduler, steps: range) -> None:
        for step in steps:
            scheduler.update({"a": stats("a", 9.0, 0.9), "b": stats("b", 2.0, 0.0)}, step)

    keys = ("reward_score", "violation_rate", "violation_rate")
    first, fresh, resumed = (_bound("ab", metric_key=key) for key in keys)
    run(first, range(50))
    run(fresh, range(20))
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    told = resumed.update({"a": stats("a", 9.0, 0.9), "b": stats("b", 2.0, 0.0)}, 50)
    assert [event.reason for event in told if event.kind == "warn"] == [
        "the checkpoint's scheduler.metric_key was reward_score, this run's is violation_rate: it starts "
        "without history"
    ]
    run(resumed, range(51, 70))
    assert resumed.weights() == pytest.approx(fresh.weights(), abs=0.05)


def test_a_rollback_past_a_change_of_policy_keeps_nothing_of_the_steps_that_it_undoes() -> None:
    former = _bound("ab", policy="learnability")
    _drive(former, 5)
    saved = json.loads(json.dumps(former.state_dict()))
    resumed, rolled_back = _bound("ab"), _bound("ab")
    resumed.load_state_dict(saved)
    rolled_back.load_state_dict(saved)
    _drive(rolled_back, 30, start=5)
    rolled_back.load_state_dict(saved)
    assert rolled_back.state_dict()["policy_state"] == resumed.state_dict()["policy_state"]
    assert rolled_back.weights() == resumed.weights()


def test_a_frozen_task_gets_nothing_where_the_others_have_no_share_either() -> None:
    scheduler = _bound("ab", min_weight=0.0, prior_prompts=0, sharpness=60.0)
    for step in range(300):
        levels = {"a": 0.3, "b": 1.0}
        stats = {
            task: TaskStats(
                task=task,
                num_prompts=16,
                num_informative=8,
                reward_mean=level,
                reward_std=0.1,
                headroom=0.3,
                lowest=[level],
                highest=[level],
            )
            for task, level in levels.items()
        }
        scheduler.update(stats, step)
    assert scheduler.weights() == {"a": 1.0, "b": 0.0}
    scheduler.set_factors({"a": 0.0, "b": 2.0})
    assert scheduler.quotas(32) == {"a": 0, "b": 32}


@pytest.mark.parametrize("metric_key", ["reward_score", "violation_rate"])
def test_a_task_without_a_value_and_without_a_gradient_is_known_to_have_none(metric_key: str) -> None:
    scheduler = _bound("ab", policy="static", metric_key=metric_key)
    for step in range(100):
        dead = TaskStats(task="a", num_prompts=16, num_informative=0, reward_mean=math.nan)
        fine = TaskStats(task="b", num_prompts=16, num_informative=16, reward_mean=0.5)
        scheduler.update({"a": dead, "b": fine}, step)
    assert scheduler.informative_rate("a") < 0.05
