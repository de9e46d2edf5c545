from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from multitask_rl.errors import ConfigError
from multitask_rl.guard.decision import CheckpointInfo, GuardAction, GuardDecision
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.records import Direction, TaskEvaluation, TaskStats
from multitask_rl.statistics.intervals import summarise
from multitask_rl.testing import make_evaluation

N = 256


class Actor:
    """Difficulties per prompt and a skill per task: evaluations repeat the prompts, as the real ones do."""

    def __init__(self, tasks: str = "ab", seed: int = 0) -> None:
        self._stream = np.random.default_rng(seed)
        self._difficulty = {t: self._stream.random(N) for t in tasks}
        self.skill = dict.fromkeys(tasks, 0.6)

    def evaluate(self, step: int, flips: float = 0.1) -> dict[str, TaskEvaluation]:
        """Each prompt is solved when it is easier than the skill; a tenth of the outcomes is redrawn."""
        return {t: self.evaluate_task(t, step, self._difficulty[t], flips) for t in self.skill}

    def evaluate_task(
        self, task: str, step: int, difficulty: np.ndarray, flips: float = 0.1
    ) -> TaskEvaluation:
        skill = self.skill[task]
        redrawn = self._stream.random(len(difficulty)) < flips
        solved = np.where(redrawn, self._stream.random(len(difficulty)) < skill, difficulty < skill)
        return make_evaluation(solved.tolist(), task=task, step=step)

    def confirm(self, good: Mapping[str, float]) -> Callable[[str], tuple[TaskEvaluation, TaskEvaluation]]:
        """Fresh prompts for the present skill and for that of the weights judged good."""

        def evaluate(task: str) -> tuple[TaskEvaluation, TaskEvaluation]:
            difficulty, now = self._stream.random(1024), self.skill[task]
            current = self.evaluate_task(task, 0, difficulty)
            self.skill[task] = good[task]
            reference = self.evaluate_task(task, 0, difficulty)
            self.skill[task] = now
            return current, reference

        return evaluate


def _guard(tasks: str = "ab", **config: Any) -> SafetyGuard:
    guard = SafetyGuard(**config)
    guard.bind(list(tasks))
    return guard


def _constant(
    values: Mapping[str, float],
    step: int,
    metrics: Mapping[str, float] | None = None,
    direction: Direction = Direction.higher,
) -> dict[str, TaskEvaluation]:
    """Exactly ``value`` of 200 prompts solved, always the first ones."""
    return {
        task: make_evaluation(
            [i < 200 * value for i in range(200)],
            task=task,
            step=step,
            direction=direction,
            metrics={
                name: summarise(
                    [float(i < 200 * rate) for i in range(200)],
                    direction=Direction.lower,
                    low=0.0,
                    high=1.0,
                    keep=range(200),
                )
                for name, rate in (metrics or {}).items()
            },
        )
        for task, value in values.items()
    }


def _run(guard: SafetyGuard, levels: list[float], *, start: int = 0, every: int = 10) -> list[GuardDecision]:
    """Evaluate task ``a`` at these levels, ``b`` at 0.7."""
    return [
        guard.observe(start + every * i, _constant({"a": level, "b": 0.7}, start + every * i))
        for i, level in enumerate(levels)
    ]


def test_constant_ability_is_kept_and_judged_good() -> None:
    for decision in _run(_guard(), [0.6] * 30):
        assert decision.action is GuardAction.keep
        assert decision.judged_good
        assert decision.events == []


def test_an_abrupt_fall_is_rolled_back_with_everything_a_person_needs() -> None:
    guard = _guard()
    decisions = _run(guard, [0.6] * 10 + [0.3, 0.3])
    first = next(d for d in decisions if d.action is GuardAction.rollback)
    assert decisions.index(first) == 10  # seen at once
    assert not first.judged_good
    assert (first.task, first.metric) == ("a", "")
    assert first.statistics["drop"] == pytest.approx(first.statistics["demonstrated"] - 0.3)
    assert first.statistics["z"] > first.statistics["z_limit"]
    assert "0.300" in first.reason
    (event,) = first.events
    assert (event.source, event.kind, event.task, event.step) == ("guard", "rollback", "a", 100)
    json.dumps(event.data, allow_nan=False)


@pytest.mark.parametrize(
    ("monitor", "share"), [("a/violation_rate", 0.5), ("a/length", 50.0)], ids=["in [0, 1]", "without an end"]
)
def test_a_reason_states_a_metric_that_should_fall_in_its_own_unit(monitor, share) -> None:
    """A loss of 1.69 was told as -1.687, a violation rate of 0.5 as 0.5 of those that comply."""
    guard = _guard("a", monitor_metrics=[monitor], directions={monitor.split("/")[1]: "lower"})
    name = monitor.split("/")[1]
    decisions = []
    for i, level in enumerate([0.1] * 10 + [0.8, 0.8]):
        values = [2 * share * (j < 200 * level) for j in range(200)]
        own = summarise(values, direction=Direction.lower if share < 1 else Direction.none, keep=range(200))
        evaluation = make_evaluation([1.0] * 200, task="a", step=10 * i, metrics={name: own})
        decisions.append(guard.observe(10 * i, {"a": evaluation}))
    reason = next(d.reason for d in decisions if d.action is GuardAction.rollback)
    level, demonstrated = map(float, re.search(r": (\S+) against a demonstrated (\S+) ", reason).groups())
    assert level == pytest.approx(1.6 * share, abs=1e-3)
    assert 0.2 * share < demonstrated < 0.4 * share


def test_a_fall_during_warm_up_is_not_acted_on() -> None:
    assert {d.action for d in _run(_guard(warmup=6), [0.6] * 3 + [0.2] * 3)} == {GuardAction.keep}


def test_nothing_is_judged_good_that_has_fallen() -> None:
    decisions = _run(_guard(warmup=20), [0.6] * 10 + [0.3] * 3)
    assert [d.judged_good for d in decisions] == [True] * 10 + [False] * 3


def test_weights_that_have_lost_half_of_a_young_ability_are_not_judged_good() -> None:
    """Held-out rewards of a chat model whose training rewards were flipped after the third evaluation.

    After so few evaluations the demonstrated value is a third below the level, so that the cautious screen
    sees no fall at the fourth; the confirmation at the fifth must not compare with the weights of the fourth.
    """
    rows = [
        [0, 0, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 0, 3, 0, 2, 0, 0, 2, 0, 0, 0, 4, 0],
        [2, 2, 2, 2, 2, 2, 2, 2, 3, 2, 2, 4, 2, 2, 2, 2, 2, 0, 0, 2, 3, 2, 4, 2],
        [2, 2, 2, 2, 2, 0, 2, 2, 3, 3, 2, 4, 2, 2, 2, 2, 2, 0, 2, 2, 3, 2, 4, 2],
        [0, 0, 2, 0, 0, 0, 2, 2, 0, 0, 2, 2, 2, 0, 0, 0, 0, 2, 0, 0, 0, 2, 4, 0],
        [0] * 24,
    ]
    guard = _guard("abcdef", threshold_delta=-0.3, warmup=3)
    good_row: list[int] = []

    def evaluation(task: str, row: list[int], step: int) -> TaskEvaluation:
        return make_evaluation([quarters / 4 for quarters in row], task=task, step=step)

    def confirm(task: str) -> tuple[TaskEvaluation, TaskEvaluation]:
        # other prompts: those of the evaluation in another order
        return evaluation(task, rows[-1], 16), evaluation(task, good_row[::-1], 0)

    decisions = []
    for number, row in enumerate(rows):
        seen = {task: evaluation(task, row if task == "a" else rows[1], 4 * number) for task in "abcdef"}
        decisions.append(guard.observe(4 * number, seen, confirm))
        good_row = row if decisions[-1].judged_good else good_row
    assert [d.judged_good for d in decisions] == [True, True, True, False, False]
    assert decisions[3].action is GuardAction.warn
    assert "0.323 lower than when last judged good, on the same prompts (z 4.0)" in decisions[3].reason
    assert decisions[4].action is GuardAction.rollback


def test_after_a_rollback_to_the_last_good_weights_they_are_still_compared_with() -> None:
    guard = _guard(threshold_delta=-0.2, cooldown_steps=10)
    decisions = _run(guard, [0.3] * 6 + [0.5, 0.64, 0.64, 0.1])
    assert decisions[-1].action is GuardAction.rollback
    assert decisions[-2].judged_good
    guard.rolled_back(CheckpointInfo(step=80, judged_good=True), step=80)
    again = guard.observe(90, _constant({"a": 0.42, "b": 0.7}, 90))
    assert not again.judged_good


def test_after_a_rollback_past_the_last_good_weights_theirs_are_not_compared_with() -> None:
    guard = _guard(threshold_delta=-0.2, cooldown_steps=10)
    decisions = _run(guard, [0.3] * 6 + [0.5, 0.64, 0.64, 0.1])
    assert decisions[-1].action is GuardAction.rollback
    guard.rolled_back(CheckpointInfo(step=50, judged_good=True), step=50)
    assert guard.observe(60, _constant({"a": 0.3, "b": 0.7}, 60)).judged_good
    assert not guard.observe(70, _constant({"a": 0.2, "b": 0.7}, 70)).judged_good


def test_many_clean_metrics_together_are_as_good_as_one() -> None:
    """200 tasks of 64 prompts at a constant level: chance alone lowers one of them by the threshold."""
    stream = np.random.default_rng(5)
    tasks = [f"t{i}" for i in range(200)]
    guard = _guard(())
    guard.bind(tasks)
    verdicts = []
    for step in range(0, 200, 10):
        rows = stream.random((200, 64)) < 0.5
        seen = {
            t: make_evaluation(row.tolist(), task=t, step=step) for t, row in zip(tasks, rows, strict=True)
        }
        verdicts.append(guard.observe(step, seen).judged_good)
    assert sum(verdicts) >= 19


def test_a_lower_level_that_lasts_and_is_no_regression_becomes_the_new_one() -> None:
    """The moving average has shown 0.5 only; the weights last judged good had 0.7."""
    guard = _guard(threshold_delta=-0.2)
    decisions = _run(guard, [0.5] * 12 + [0.7] + [0.5] * 6)
    assert [d.judged_good for d in decisions] == [True] * 13 + [False] * 4 + [True] * 2
    assert {d.action for d in decisions} == {GuardAction.keep, GuardAction.warn}


def test_rollback_target_is_the_newest_judged_good_in_reach_and_never_an_unjudged_one() -> None:
    guard = _guard(rollback_steps=50)
    _run(guard, [0.6] * 10 + [0.3])  # alarm at step 100, last good evaluation at 90
    infos = [
        CheckpointInfo(step=40, judged_good=True),
        CheckpointInfo(step=70, judged_good=True),
        CheckpointInfo(step=80, judged_good=False),
        CheckpointInfo(step=95, judged_good=None),
        CheckpointInfo(step=100, judged_good=None),
    ]
    assert guard.rollback_target(infos) == infos[1]
    assert guard.rollback_target(infos[:1]) is None  # 60 steps back
    assert guard.rollback_target(infos[2:]) is None
    assert guard.rollback_target([]) is None


def test_rollback_target_prefers_a_checkpoint_from_before_the_fall_began() -> None:
    guard = _guard()
    decisions = _run(guard, [0.6] * 10 + [0.56, 0.52, 0.48, 0.42, 0.36])
    assert decisions[-1].action is GuardAction.rollback or GuardAction.rollback in {
        d.action for d in decisions
    }
    infos = [CheckpointInfo(step=s, judged_good=True) for s in (80, 90, 130)]
    assert guard.rollback_target(infos) == infos[1]
    assert guard.rollback_target(infos[2:]) == infos[2]


def _stats(task: str, informative: int, reward: float = 0.5) -> TaskStats:
    return TaskStats(task=task, num_prompts=8, num_informative=informative, reward_mean=reward)


def _fall(guard: SafetyGuard, rewards: Callable[[int], float] = lambda step: 0.5) -> GuardDecision:
    for step in range(0, 110):
        guard.record_step(step, {"a": _stats("a", 2, rewards(step)), "b": _stats("b", 7)})
        if step % 10 == 0:
            level = 0.6 if step < 100 else 0.3
            decision = guard.observe(step, _constant({"a": level, "b": 0.7}, step))
    return decision


def test_something_changes_so_that_the_failure_is_not_replayed() -> None:
    guard = _guard()
    decision = _fall(guard)
    change = decision.adjustments
    assert change.skip_data
    assert (change.victim, change.culprit) == ("a", "b")
    assert guard.weight_factors() == {"a": 2.0, "b": 0.5}
    (event,) = guard.rolled_back(CheckpointInfo(step=90, judged_good=True), step=90)
    assert event.kind == "rolled_back"
    assert "for 50 steps, share of a x 2, share of b x 0.5, data of the window skipped" in event.reason
    assert [guard.lr_factor(step) for step in (90, 139, 140, 165, 190, 500)] == [
        0.5,
        0.5,
        0.5,
        0.75,
        1.0,
        1.0,
    ]


@pytest.mark.parametrize(
    ("trained", "shares"),
    [("bc", "share of b x 0.5, "), ("b", "")],
    ids=["two are trained", "one is trained"],
)
def test_a_rollback_names_only_shares_that_it_changes(trained: str, shares: str) -> None:
    """Task ``a`` falls, and is only evaluated; a task that is trained alone keeps the whole share."""
    guard = _guard("abc")
    for step in range(0, 110):
        guard.record_step(step, {task: _stats(task, 7 if task == "b" else 2) for task in trained})
        if step % 10 == 0:
            guard.observe(step, _constant({"a": 0.6 if step < 100 else 0.3, "b": 0.7, "c": 0.7}, step))
    (event,) = guard.rolled_back(CheckpointInfo(step=0, judged_good=True), step=0)
    assert f"for 50 steps, {shares}data of the window skipped" in event.reason


def test_neither_a_recovery_nor_a_milder_action_ends_the_slower_learning_rate() -> None:
    guard = _guard(cooldown_steps=20, lr_hold_steps=500, lr_rewarm_steps=100, ladder=["reweight", "rollback"])
    deep = _run(guard, [0.6] * 10 + [0.1])[-1]
    assert deep.action is GuardAction.rollback
    guard.rolled_back(CheckpointInfo(step=90, judged_good=True), step=90)
    decisions = _run(guard, [0.6] * 8, start=100)
    assert "recovered" in [event.kind for d in decisions for event in d.events]
    assert [guard.lr_factor(step) for step in (180, 580, 640, 700)] == [0.5, 0.5, 0.75, 1.0]
    actions = [d.action for d in _run(guard, [0.48] * 6, start=180)]
    assert GuardAction.reweight in actions
    copy = _guard(cooldown_steps=20, lr_hold_steps=500, lr_rewarm_steps=100, ladder=["reweight", "rollback"])
    copy.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    for one in (guard, copy):
        assert [one.lr_factor(step) for step in (180, 580, 640, 700)] == [0.5, 0.5, 0.75, 1.0]


def test_a_task_trained_into_its_own_fall_is_its_own_culprit() -> None:
    """Its training reward rose while the held-out metric fell: flipped labels or a hacked reward."""
    guard = _guard()
    # The last good evaluation is at step 90; eighteen recorded steps follow it.
    for step in range(0, 120):
        reward = 0.3 + 0.02 * max(0, step - 90)
        guard.record_step(step, {"a": _stats("a", 2, reward), "b": _stats("b", 7)})
        if step % 10 == 0 and step != 100:
            decision = guard.observe(step, _constant({"a": 0.6 if step <= 90 else 0.3, "b": 0.7}, step))
    assert decision.adjustments.culprit == "a"
    assert guard.weight_factors() == {"a": 0.0}  # half its share would only fall again


@pytest.mark.parametrize(
    ("slope", "other", "action", "factors"),
    [
        (0.02, 7, GuardAction.rollback, {"a": 0.0}),
        (0.02, 0, GuardAction.stop, {}),
        (-0.02, 0, GuardAction.rollback, {}),
    ],
    ids=["rises beside another task", "rises alone", "falls alone"],
)
def test_a_task_trained_alone_into_its_own_fall_twice_stops_the_run(slope, other, action, factors) -> None:
    """No other task could get its share: after each rollback the reward would lead to the same fall."""

    def fall(guard: SafetyGuard, start: int) -> GuardDecision:
        for step in range(start, start + 110):
            stats = {"a": _stats("a", 2, 0.3 + slope * max(0, step - start - 90))}
            if other:
                stats["b"] = _stats("b", other)
            if step % 10 == 0 and step != start + 100:
                assert guard.observe(step, _constant({"a": 0.6, "b": 0.7}, step)).action is GuardAction.keep
            guard.record_step(step, stats)
        return guard.observe(start + 110, _constant({"a": 0.3, "b": 0.7}, start + 110))

    guard = _guard(cooldown_steps=20)
    first = fall(guard, 0)
    assert first.action is GuardAction.rollback
    assert guard.weight_factors() == factors
    guard.rolled_back(CheckpointInfo(step=90, judged_good=True), step=90)
    copy = _guard(cooldown_steps=20)
    copy.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    for one in (guard, copy):
        second = fall(one, 100)
        assert second.action is action
        assert ("while its training reward rose" in second.reason) == (action is GuardAction.stop)
        good = [CheckpointInfo(step=190, judged_good=True), CheckpointInfo(step=200, judged_good=False)]
        assert one.rollback_target(good) == good[0]


@pytest.mark.parametrize("tasks", ["a", "ab"], ids=["removed", "only evaluated"])
def test_a_task_that_a_resume_no_longer_trains_is_no_culprit(tasks: str) -> None:
    guard = _guard()
    for step in range(100):
        if step % 10 == 0:
            guard.observe(step, _constant({"a": 0.6, "b": 0.7}, step))
        guard.record_step(step, {"a": _stats("a", 2), "b": _stats("b", 7)})
    resumed = _guard(tasks)
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    for step in range(100, 110):
        resumed.record_step(step, {"a": _stats("a", 2)})
    decision = resumed.observe(110, _constant({"a": 0.3, "b": 0.7}, 110))
    assert decision.action is GuardAction.rollback
    assert decision.adjustments.culprit == "a"
    assert resumed.weight_factors() == {}, "no other task could get its share"


def test_a_task_that_a_resume_removes_is_named_no_more() -> None:
    guard = _guard("abc")
    levels = {"a": 0.6, "b": 0.7, "c": 0.5}
    for step in range(100):
        if step % 10 == 0:
            guard.observe(step, _constant(levels, step))
        guard.record_step(step, {"a": _stats("a", 2), "b": _stats("b", 7), "c": _stats("c", 1)})
    before = json.loads(json.dumps(guard.state_dict()))
    guard.observe(100, _constant({**levels, "a": 0.3}, 100))
    guard.rolled_back(CheckpointInfo(step=90, judged_good=True), step=90)
    assert guard.weight_factors() == {"a": 2.0, "b": 0.5}
    after = json.loads(json.dumps(guard.state_dict()))

    resumed = _guard("ac")
    resumed.load_state_dict(before)
    resumed.forget_tasks(["b"])
    assert resumed.observe(100, _constant({"a": 0.3, "c": 0.5}, 100)).adjustments.culprit == "c"
    resumed.load_state_dict(after)
    resumed.forget_tasks(["b"])
    assert resumed.weight_factors() == {"a": 2.0}, "no culprit to hold back"
    resumed = _guard("bc")
    resumed.load_state_dict(after)
    resumed.forget_tasks(["a"])
    assert resumed.weight_factors() == {}, "no victim that could recover"
    assert resumed.lr_factor(90) == 0.5
    decisions = [resumed.observe(step, _constant({"b": 0.7, "c": 0.5}, step)) for step in range(90, 300, 10)]
    assert all(decision.events == [] for decision in decisions)


@pytest.mark.parametrize(
    ("held_out", "rewards"),
    [
        # the moving average puts the fall later than it began
        (
            [0.075, 0.28, 0.375, 0.245, 0.0],
            [0.05, 0.1, 0.2, 0.15, 0.3, 0.25, 0.35, 0.3, 0.2, 0.0, 0.667, 0.719, 0.875, 0.938, 0.953, 1.0],
        ),
        # the reward is high already when the held-out metric begins to fall
        (
            [0.172, 0.312, 0.371, 0.434, 0.016],
            [0.03, 0.05, 0.19, 0.09, 0.44, 0.17, 0.31, 0.22, 0.31, 0.375, 0.64, 0.625, 0.78, 0.72, 0.59, 1.0],
        ),
    ],
)
def test_the_culprit_is_found_in_two_runs_of_a_chat_model(held_out, rewards) -> None:
    """Recorded: rewards of ``a`` flipped after step 8, an evaluation every 4 steps."""
    guard = _guard()
    for step in range(17):
        if step % 4 == 0:
            decision = guard.observe(step, _constant({"a": held_out[step // 4], "b": 0.7}, step))
        if step < 16:
            guard.record_step(step, {"a": _stats("a", 2, rewards[step]), "b": _stats("b", 7)})
    assert decision.action is GuardAction.rollback
    assert (decision.adjustments.victim, decision.adjustments.culprit) == ("a", "a")
    infos = [CheckpointInfo(step=step, judged_good=True) for step in (4, 8)]
    assert guard.rollback_target(infos) == infos[1]


def test_a_task_that_seems_to_cause_its_own_fall_is_slowed_not_frozen_before_a_rollback() -> None:
    guard = _guard(ladder=["reweight", "rollback"])
    for step in range(90):
        guard.record_step(step, {"a": _stats("a", 2, 0.3 + 0.005 * step), "b": _stats("b", 9)})
    actions = [d.action for d in _run(guard, [0.6] * 9 + [0.48] * 6)]
    assert next(a for a in actions if a is not GuardAction.keep and a is not GuardAction.warn) is (
        GuardAction.reweight
    )
    assert guard.weight_factors()["a"] == 0.5


def test_rollback_target_predates_the_part_of_a_fall_that_leaves_no_evidence() -> None:
    """0.57 is within half of the threshold below 0.6: the CUSUM is still 0 there, and it is judged good."""
    guard = _guard()
    decisions = _run(guard, [0.6] * 10 + [0.57, 0.3])
    assert decisions[10].judged_good
    assert decisions[11].action is GuardAction.rollback
    infos = [CheckpointInfo(step=step, judged_good=True) for step in (80, 90, 100)]
    assert guard.rollback_target(infos) == infos[1]


def test_rollback_target_is_no_step_at_which_the_fallen_metric_had_no_value() -> None:
    """Its rewards failed in the first evaluation; a metric that never had a value does not count."""
    guard = _guard()
    for step in range(0, 110, 10):
        cost = [(5.0 if step < 100 else 9.0) + i % 5 for i in range(200)]
        found = _constant({"a": 0.6}, step)
        if step:
            found["b"] = make_evaluation(cost, task="b", step=step, direction=Direction.lower)
        decision = guard.observe(step, found)
        assert decision.judged_good == (step < 100)
    assert (decision.action, decision.task) == (GuardAction.rollback, "b")
    infos = [CheckpointInfo(step=step, judged_good=True) for step in (0, 50, 80)]
    assert guard.rollback_target(infos) == infos[2]


def test_after_a_change_of_the_task_that_only_warns_a_rollback_looks_at_no_earlier_values() -> None:
    def evaluate(level: float, step: int) -> TaskEvaluation:
        return _constant({"a": level}, step)["a"]

    def levels(steps: range) -> list[GuardDecision]:
        found = []
        for step in steps:
            now = 0.8 if step < 220 else 0.4 if step < 300 else 0.1
            pair = evaluate(now, step), evaluate(0.4, 210)  # the good weights in the changed world
            found.append(guard.observe(step, {"a": evaluate(now, step)}, lambda _, pair=pair: pair))
        return found

    guard = _guard("a", on_changed_task="warn")
    decisions = levels(range(0, 310, 10))
    assert [d.action for d in decisions] == [
        *[GuardAction.keep] * 22,
        GuardAction.warn,
        *[GuardAction.keep] * 7,
        GuardAction.rollback,
    ]
    good = [CheckpointInfo(step=step, judged_good=True) for step in (200, 210, 260, 280)]
    assert guard.rollback_target(good) == good[3]
    guard.rolled_back(good[1], step=210)  # the others are damaged
    assert {d.action for d in levels(range(220, 300, 10))} == {GuardAction.keep}, "the change was told"


def test_factors_are_lifted_once_the_victim_has_recovered_and_the_cooldown_is_over() -> None:
    guard = _guard(cooldown_steps=50)
    _fall(guard)
    guard.rolled_back(CheckpointInfo(step=90, judged_good=True), step=90)
    decisions = _run(guard, [0.6] * 8, start=100)
    recovered = [d.events[0].step for d in decisions if d.events]
    assert recovered == [140]
    assert guard.weight_factors() == {}


def test_cooldown_lets_nothing_add_up() -> None:
    guard = _guard(cooldown_steps=60)
    _fall(guard)
    guard.rolled_back(CheckpointInfo(step=90, judged_good=True), step=90)
    actions = [d.action for d in _run(guard, [0.5] * 12, start=100)]
    assert actions[:5] == [GuardAction.keep] * 5  # steps 100..140
    assert GuardAction.rollback in actions[5:]


def test_cooldown_does_not_hide_that_restored_weights_fall_again_at_once() -> None:
    guard = _guard(cooldown_steps=60)
    _fall(guard)
    guard.rolled_back(CheckpointInfo(step=90, judged_good=True), step=90)
    assert [d.action for d in _run(guard, [0.6, 0.3], start=100)] == [GuardAction.keep, GuardAction.rollback]


def test_cooldown_waits_for_weights_that_no_checkpoint_could_replace() -> None:
    guard = _guard(cooldown_steps=60)
    _fall(guard)  # and no rollback: the trainer found no target
    assert {d.action for d in _run(guard, [0.3] * 5, start=101)} == {GuardAction.keep}


def test_rollbacks_without_a_checkpoint_to_return_to_are_not_counted() -> None:
    guard, alarms, step = _guard(max_rollbacks=2, cooldown_steps=0), [], 0
    for _ in range(4):
        alarms.append(_run(guard, [0.6] * 6 + [0.3], start=step)[-1])
        step += 70
    assert [d.action for d in alarms] == [GuardAction.rollback] * 4
    assert {d.adjustments.lr_factor for d in alarms} == {0.5}
    assert guard.metrics()["guard/rollbacks"] == 0


def test_rollbacks_are_bounded_then_the_run_stops() -> None:
    guard = _guard(max_rollbacks=2, cooldown_steps=0)
    actions, step = [], 0
    for _ in range(3):
        decisions = _run(guard, [0.6] * 6 + [0.3], start=step)
        step += 70
        actions.append(decisions[-1].action)
        if decisions[-1].action is GuardAction.rollback:
            guard.rolled_back(CheckpointInfo(step=step - 20, judged_good=True), step=step)
    assert actions == [GuardAction.rollback, GuardAction.rollback, GuardAction.stop]
    assert guard.metrics()["guard/rollbacks"] == 2


def test_each_further_rollback_changes_more() -> None:
    guard = _guard(cooldown_steps=0)
    _fall(guard)
    guard.rolled_back(CheckpointInfo(step=90, judged_good=True), step=90)
    guard.record_step(105, {"a": _stats("a", 2), "b": _stats("b", 7)})
    again = _run(guard, [0.6, 0.3], start=100)[-1]
    assert again.action is GuardAction.rollback
    assert again.adjustments.lr_factor == 0.25
    assert again.adjustments.weight_factors["b"] == 0.25


def test_old_rollbacks_leave_the_window() -> None:
    guard = _guard(max_rollbacks=1, cooldown_steps=0, rollback_window=50)
    first = _run(guard, [0.6] * 6 + [0.3])
    guard.rolled_back(CheckpointInfo(step=50, judged_good=True), step=60)
    second = _run(guard, [0.6] * 6 + [0.3], start=120)
    assert first[-1].action is second[-1].action is GuardAction.rollback


def test_after_a_rollback_the_guard_remembers_what_the_restored_weights_had_shown() -> None:
    guard = _guard()
    _run(guard, [0.3] * 10 + [0.9] * 10)  # a jump, its level demonstrated after step 100
    guard.rolled_back(CheckpointInfo(step=90, judged_good=True), step=90)
    actions = {d.action for d in _run(guard, [0.3] * 30, start=100)}
    assert actions == {GuardAction.keep}


def test_an_unconfirmed_alarm_only_warns() -> None:
    guard = _guard()
    _run(guard, [0.6] * 10)
    same = _constant({"a": 0.6}, 0)["a"]
    decision = guard.observe(100, _constant({"a": 0.3, "b": 0.7}, 100), confirm=lambda task: (same, same))
    assert decision.action is GuardAction.warn
    assert decision.statistics["z"] == 0.0
    assert guard.weight_factors() == {}


def test_good_weights_that_score_lower_than_when_they_were_saved_stop_the_run() -> None:
    """Neither side is worse than the other: the world, the reward or the data changed, not the actor."""
    guard = _guard()
    _run(guard, [0.6] * 10)
    now, then = _constant({"a": 0.3}, 100)["a"], _constant({"a": 0.3}, 90)["a"]
    decision = guard.observe(100, _constant({"a": 0.3, "b": 0.7}, 100), confirm=lambda task: (now, then))
    assert decision.action is GuardAction.stop
    assert decision.events[0].kind == "stop"
    assert "has changed: the weights of step 90 scored 0.600 there and score 0.300 now" in decision.reason
    told = "); set guard.guard_config.on_changed_task=warn to go on with the task as it is"
    assert decision.reason.endswith(told)
    assert decision.statistics["z_changed"] > 3.09
    checkpoints = [CheckpointInfo(step=step, judged_good=True) for step in (50, 90)]
    target = guard.rollback_target(checkpoints)
    assert target is not None
    assert target.step == 50  # the evaluations beside that of step 90 count too
    warned = _guard(on_changed_task="warn")
    _run(warned, [0.6] * 10)
    decision = warned.observe(100, _constant({"a": 0.3, "b": 0.7}, 100), confirm=lambda task: (now, then))
    assert (decision.action, "has changed" in decision.reason) == (GuardAction.warn, True)


def test_good_weights_older_than_the_recorded_evaluations_say_nothing_about_the_task() -> None:
    guard = _guard()
    _run(guard, [0.6] * 10)
    now, then = _constant({"a": 0.3}, 100)["a"], _constant({"a": 0.3}, -1)["a"]
    decision = guard.observe(100, _constant({"a": 0.3, "b": 0.7}, 100), confirm=lambda task: (now, then))
    assert (decision.action, "has changed" in decision.reason) == (GuardAction.warn, False)


def test_alarms_after_the_first_confirmed_one_are_not_answered() -> None:
    """``a`` falls most and is not confirmed, ``b`` is: ``c`` is neither evaluated anew nor adjusted."""
    guard, asked = _guard("abc"), []
    high, low = dict.fromkeys("abc", 0.9), {"a": 0.2, "b": 0.3, "c": 0.4}
    for step in range(0, 80, 10):
        guard.observe(step, _constant(high, step))

    def confirm(task: str) -> tuple[TaskEvaluation, TaskEvaluation]:
        asked.append(task)
        now = high if task == "a" else low
        return _constant(now, 80)[task], _constant(high, 70)[task]

    decision = guard.observe(80, _constant(low, 80), confirm)
    assert (decision.action, decision.task) == (GuardAction.rollback, "b")
    assert asked == ["a", "b"]
    assert decision.adjustments.victim == guard.state_dict()["fallen"] == "b"


@pytest.mark.parametrize("is_fixed", [False, True])
def test_fresh_evaluations_of_one_alarm_are_pooled_by_prompt(is_fixed: bool) -> None:
    """One is too small (z = 2.4); two confirm, unless the second has the same values (fixed texts)."""
    guard = _guard()
    _run(guard, [0.6] * 10)

    def fresh(number: int) -> tuple[TaskEvaluation, TaskEvaluation]:
        first = 0 if is_fixed else 70 * number  # other prompts than before
        sides = [[i in range(first, first + solved) for i in range(200)] for solved in (120, 126)]
        current, good = (make_evaluation(side, task="a", step=100 + number) for side in sides)
        return current, good

    decisions = [
        guard.observe(100 + i, _constant({"a": 0.3, "b": 0.7}, 100 + i), confirm=lambda _, i=i: fresh(i))
        for i in range(2)
    ]
    confirmed = GuardAction.warn if is_fixed else GuardAction.rollback
    assert [d.action for d in decisions] == [GuardAction.warn, confirmed]
    assert decisions[1].statistics["paired_prompts"] == 200


def _losses(mean: float, longest: float, step: int, name: str = "loss") -> dict[str, TaskEvaluation]:
    values = [longest, *(mean + 0.005 * (i % 5 - 2) for i in range(255))]
    own = summarise(values, direction=Direction.lower, low=0.0, keep=range(256))
    return {"a": make_evaluation([0.5] * 256, task="a", step=step, metrics={name: own})}


@pytest.mark.parametrize("longest", [0.99, 1.05])
@pytest.mark.parametrize(
    ("before", "after", "acts"), [(0.97, 1.97, True), (0.9, 0.93, False), (0.3, 0.36, True)]
)
def test_a_loss_is_watched_the_same_way_whether_its_first_values_are_below_one(
    longest: float, before: float, after: float, acts: bool
) -> None:
    guard = _guard("a", monitor_metrics=["a/loss"])
    decisions = [guard.observe(10 * i, _losses(before, longest, 10 * i)) for i in range(8)]
    decisions += [guard.observe(10 * i, _losses(after, longest, 10 * i)) for i in range(8, 30)]
    assert {d.action for d in decisions[:8]} == {GuardAction.keep}
    assert any(d.action is GuardAction.rollback for d in decisions) == acts


def test_a_drop_of_the_kl_to_the_initial_actor_is_in_nats() -> None:
    guard = _guard("a", monitor_metrics=["a/kl"], threshold_delta=-0.2)

    def observe(kl: float, step: int) -> GuardDecision:
        values = [kl * (0.9 + 0.05 * (i % 5)) for i in range(256)]
        own = summarise(values, direction=Direction.lower, low=0.0, keep=range(256))
        return guard.observe(step, {"a": make_evaluation([0.5], task="a", step=step, metrics={"kl": own})})

    calm = [observe(0.001 * i, 10 * i) for i in range(10)] + [observe(0.09, 10 * i) for i in range(10, 30)]
    assert {d.action for d in calm} == {GuardAction.keep}
    far = [observe(0.3, 10 * i) for i in range(30, 33)]
    (found,) = [d for d in far if d.action is GuardAction.rollback][:1]
    assert found.statistics["value"] == pytest.approx(-0.3, abs=0.01)
    assert found.statistics["relevant_drop"] == pytest.approx(0.2)


def test_the_kl_of_an_anchor_that_comes_late_is_in_nats_too() -> None:
    guard = _guard("a", monitor_metrics=["a/kl"], threshold_delta=-0.2)
    for i, kl in enumerate([0.05] * 6 + [0.09] * 20):  # nearly doubled, by 0.04 nats
        own = summarise([kl * (0.9 + 0.05 * (j % 5)) for j in range(256)], direction=Direction.lower, low=0.0)
        found = {"a": make_evaluation([0.5], task="a", step=10 * i, metrics={"kl": own})}
        assert guard.observe(10 * i, found).action is GuardAction.keep


def _defined(
    definition: str,
    step: int,
    level: float,
    metrics: Mapping[str, float] | None = None,
    constraints: str = "",
) -> dict[str, TaskEvaluation]:
    found = _constant({"a": level}, step, metrics)
    return {"a": replace(found["a"], definitions={"": definition, "constraint": constraints})}


def test_another_definition_of_the_reward_leaves_metrics_alone_that_no_reward_enters() -> None:
    guard = _guard("a", monitor_metrics=["a", "a/failure_rate"])
    for i in range(10):
        guard.observe(10 * i, _defined("first", 10 * i, 0.9, {"failure_rate": 0.1}))
    told = guard.observe(100, _defined("second", 100, 0.3, {"failure_rate": 0.1})).events
    assert [(event.kind, event.reason.partition(":")[0]) for event in told] == [("redefined", "a")]
    worse = [
        guard.observe(10 * i, _defined("second", 10 * i, 0.3, {"failure_rate": 0.7})) for i in range(11, 16)
    ]
    assert [d.reason.partition(" ")[0] for d in worse if d.action is GuardAction.rollback][:1] == [
        "a/failure_rate"
    ]


def test_a_metric_begins_anew_with_its_own_definition_and_no_other() -> None:
    guard = _guard("a", monitor_metrics=["a", "a/violation_rate"])
    for i in range(10):
        guard.observe(10 * i, _defined("first", 10 * i, 0.9, {"violation_rate": 0.1}, "old rule"))
    told = guard.observe(100, _defined("first", 100, 0.9, {"violation_rate": 0.7}, "new rule")).events
    assert [(event.kind, event.reason.partition(":")[0]) for event in told] == [
        ("redefined", "a/violation_rate")
    ]
    fallen = [
        guard.observe(10 * i, _defined("first", 10 * i, 0.3, {"violation_rate": 0.7}, "new rule"))
        for i in range(11, 16)
    ]
    assert [d.reason.partition(" ")[0] for d in fallen if d.action is GuardAction.rollback][:1] == ["a"]


def test_a_fall_that_was_answered_is_over_when_its_task_is_defined_anew() -> None:
    guard = _guard("ab", cooldown_steps=0, confirm=False)
    _run(guard, [0.9] * 10 + [0.3])
    guard.rolled_back(CheckpointInfo(step=90, judged_good=True), step=90)
    assert guard.weight_factors() != {}
    found = _constant({"a": 0.3, "b": 0.7}, 100)
    before = {task: replace(own, definitions={"": "old"}) for task, own in found.items()}
    guard.observe(100, before)
    decision = guard.observe(
        110, {task: replace(own, definitions={"": "new"}, step=110) for task, own in found.items()}
    )
    assert [event.kind for event in decision.events] == ["redefined", "redefined"]
    assert "task shares follow the scheduler alone again" in decision.events[0].reason
    assert guard.weight_factors() == {}


def test_an_interrupted_evaluation_leaves_the_change_to_be_told_again() -> None:
    guard = _guard("a")
    for i in range(10):
        guard.observe(10 * i, _defined("first", 10 * i, 0.9))
    before = guard.state_dict()
    guard.observe(100, _defined("second", 100, 0.3))
    guard.load_state_dict(before)  # as the supervisor does when an observation was interrupted
    assert [e.kind for e in guard.observe(100, _defined("second", 100, 0.3)).events] == ["redefined"]


def test_the_answer_to_a_fall_stays_if_another_metric_of_the_task_is_defined_anew() -> None:
    guard = _guard("a", monitor_metrics=["a", "a/violation_rate"], confirm=False)
    for i in range(11):
        level = 0.9 if i < 10 else 0.3
        guard.observe(10 * i, _defined("first", 10 * i, level, {"violation_rate": 0.1}, "old rule"))
    guard.rolled_back(CheckpointInfo(step=90, judged_good=True), step=90)
    answer = guard.weight_factors()
    assert answer
    guard.observe(100, _defined("first", 100, 0.3, {"violation_rate": 0.1}, "new rule"))
    assert guard.weight_factors() == answer


def test_another_direction_in_the_settings_begins_anew() -> None:
    def lengths(step: int) -> dict[str, TaskEvaluation]:
        own = summarise([90.0 + i % 5 for i in range(256)], keep=range(256))
        return {"a": make_evaluation([0.5] * 256, task="a", step=step, metrics={"length": own})}

    guard = _guard("a", monitor_metrics=["a/length"], directions={"length": "higher"})
    for i in range(10):
        guard.observe(10 * i, lengths(10 * i))
    other = _guard("a", monitor_metrics=["a/length"], directions={"length": "lower"})
    other.load_state_dict(guard.state_dict())
    decisions = [other.observe(10 * i, lengths(10 * i)) for i in range(10, 20)]
    assert [event.kind for d in decisions for event in d.events] == ["redefined"]
    assert {d.action for d in decisions} == {GuardAction.keep}


def test_a_task_whose_world_has_changed_hides_no_regression_of_another() -> None:
    stream = np.random.default_rng(0)

    def evaluation(task: str, level: float, step: int) -> TaskEvaluation:
        return make_evaluation((stream.random(N) < level).tolist(), task=task, step=step)

    guard = _guard("ab", on_changed_task="warn")
    good, told = 0, []
    for step in range(0, 450, 10):
        levels = {"a": 0.8 if step < 120 else 0.4, "b": 0.7 if step < 250 else 0.3}
        # the good weights score as low in the changed world of a; in b they are as good as ever
        before = {"a": levels["a"], "b": 0.7}

        def confirm(task: str, levels=levels, before=before, step=step, good=good):  # type: ignore[no-untyped-def]
            return evaluation(task, levels[task], step), evaluation(task, before[task], good)

        decision = guard.observe(step, {t: evaluation(t, p, step) for t, p in levels.items()}, confirm)
        good = step if decision.judged_good else good
        told.append((step, decision.action, decision.task))
        if decision.action is GuardAction.rollback:
            break
    assert told[-1][1:] == (GuardAction.rollback, "b")
    assert told[-1][0] <= 280
    warned = [step for step, action, task in told if action is GuardAction.warn and task == "a"]
    assert 0 < len(warned) <= 3, "the changed level is the new one"
    assert good >= 200


def test_a_rollback_to_before_a_task_was_added_forgets_what_the_undone_weights_reached_in_it() -> None:
    first = _guard("a", confirm=False)
    for i in range(11):
        first.observe(10 * i, _constant({"a": 0.9}, 10 * i))
    guard = _guard("ab", confirm=False)
    guard.load_state_dict(first.state_dict())  # a resume at step 100 adds b, which harms a
    decisions = [guard.observe(10 * i, _constant({"a": 0.3, "b": 0.9}, 10 * i)) for i in range(11, 30)]
    assert GuardAction.rollback in [d.action for d in decisions]
    guard.rolled_back(CheckpointInfo(step=100, judged_good=True), step=100)
    after = [guard.observe(10 * i, _constant({"a": 0.9, "b": 0.1}, 10 * i)) for i in range(11, 40)]
    assert {d.action for d in after} == {GuardAction.keep}
    assert after[-1].judged_good


def test_a_rollback_over_a_redefinition_keeps_the_present_one() -> None:
    guard = _guard("a")
    for i in range(10):
        guard.observe(10 * i, _defined("first", 10 * i, 0.9))
    assert [e.kind for e in guard.observe(100, _defined("second", 100, 0.3)).events] == ["redefined"]
    guard.rolled_back(CheckpointInfo(step=90, judged_good=True), step=90)
    after = [guard.observe(10 * i, _defined("second", 10 * i, 0.3)) for i in range(10, 40)]
    assert {d.action for d in after} == {GuardAction.keep}
    assert not [event for d in after for event in d.events], (
        "the weights of step 90 are judged by the new one"
    )


def test_the_ladder_is_climbed_one_rung_per_alarm_and_a_deep_fall_goes_to_its_end() -> None:
    guard = _guard(ladder=["reweight", "freeze", "rollback"], stored_z=-9.0)
    for step in range(0, 100):
        guard.record_step(step, {"a": _stats("a", 2), "b": _stats("b", 7)})
    decisions = _run(guard, [0.6] * 10 + [0.48] * 20)
    acted = [d for d in decisions if d.action not in (GuardAction.keep, GuardAction.warn)]
    assert [d.action for d in acted[:3]] == [GuardAction.reweight, GuardAction.freeze, GuardAction.rollback]
    assert acted[0].adjustments.weight_factors == {"a": 2.0, "b": 0.5}
    assert acted[0].adjustments.lr_factor == 1.0
    assert acted[1].adjustments.weight_factors == {"a": 2.0, "b": 0.0}
    told = [event.reason for d in acted[:2] for event in d.events]  # the task of the event is the victim
    assert told[0].endswith("); share of a x 2, share of b x 0.5 until a has recovered")
    assert told[1].endswith("); share of a x 2, share of b x 0 until a has recovered")
    deep = _guard(ladder=["reweight", "freeze", "rollback"])
    assert _run(deep, [0.6] * 10 + [0.1])[-1].action is GuardAction.rollback


@pytest.mark.parametrize("use_confirm", [False, True])
def test_noisy_runs_are_left_alone_and_planted_falls_found(use_confirm: bool) -> None:
    """20 actors, 60 clean evaluations, then a fall by a quarter: no false alarm, all found within 5."""
    delays = []
    for seed in range(20):
        actor, guard = Actor("ab", seed), _guard("ab")
        for i in range(65):
            if i == 60:
                actor.skill["a"] *= 0.75
            confirm = actor.confirm({"a": 0.6, "b": 0.6}) if use_confirm else None
            decision = guard.observe(i, actor.evaluate(i), confirm)
            if decision.action is GuardAction.rollback:
                delays.append(i - 60)
                break
    assert len(delays) >= 19
    assert all(0 <= delay < 5 for delay in delays)


def test_a_slow_leak_is_found_within_twenty_evaluations() -> None:
    """2 % of the level lost per evaluation, without a fresh evaluation."""
    found = 0
    for seed in range(20):
        actor, guard = Actor("ab", seed), _guard("ab")
        for i in range(60):
            if i >= 40:
                actor.skill["a"] *= 0.98
            if guard.observe(i, actor.evaluate(i)).action is GuardAction.rollback:
                found += i >= 40
                break
    assert found >= 19


def test_lower_is_better_watches_the_complement() -> None:
    guard = SafetyGuard()
    guard.bind(["a"])
    decisions = [
        guard.observe(s, _constant({"a": rate}, s, direction=Direction.lower))
        for s, rate in enumerate([0.02] * 10 + [0.01, 0.3])
    ]
    assert [d.action for d in decisions[:11]] == [GuardAction.keep] * 11
    assert decisions[11].action is GuardAction.rollback
    assert decisions[11].statistics["value"] == pytest.approx(0.7)


def test_a_further_metric_is_watched_by_its_mean() -> None:
    guard = _guard("a", monitor_metrics=["a/violation_rate"])
    rates = [0.02] * 10 + [0.5]
    decisions = [
        guard.observe(s, _constant({"a": 0.6}, s, {"violation_rate": r})) for s, r in enumerate(rates)
    ]
    assert decisions[-1].action is GuardAction.rollback
    assert (decisions[-1].task, decisions[-1].metric) == ("a", "violation_rate")


def test_values_without_a_zero_are_watched_against_their_spread() -> None:
    """A reward model's scores around 0, spread 1: a fall by one spread is found, noise is not."""
    stream = np.random.default_rng(0)
    prompts = stream.normal(size=N)
    guard = _guard("a")
    actions = []
    for step in range(60):
        values = prompts + 0.3 * stream.normal(size=N) - (1.0 if step >= 50 else 0.0)
        evaluation = make_evaluation(values.tolist(), task="a", step=step)
        actions.append(guard.observe(step, {"a": evaluation}).action)
    assert set(actions[:50]) == {GuardAction.keep}
    assert actions[50] is GuardAction.rollback


def test_a_metric_near_zero_has_no_relative_regression() -> None:
    assert {d.action for d in _run(_guard(), [0.04] * 10 + [0.0] * 10)} == {GuardAction.keep}


def test_an_evaluation_that_failed_is_not_judged_good_and_said_once() -> None:
    guard = _guard()
    _run(guard, [0.6] * 5)
    failed = {
        **_constant({"b": 0.7}, 60),
        "a": make_evaluation([math.nan] * 4, task="a", step=60),
    }
    first, second = guard.observe(60, failed), guard.observe(70, failed)
    assert not first.judged_good
    assert [e.kind for e in first.events] == ["warn"]
    assert second.events == []
    assert guard.observe(80, _constant({"a": 0.6, "b": 0.7}, 80)).judged_good


@pytest.mark.parametrize("blind", ["c", "a/violations"])
def test_a_metric_that_never_had_a_value_is_told_once_and_leaves_the_others_guarded(blind: str) -> None:
    guard = _guard("abc", monitor_metrics=["a", "b", blind])
    decisions = []
    for step in range(11):
        level = 0.6 if step < 10 else 0.3
        evaluations = _constant({"a": level, "b": 0.7}, step, {"violation_rate": 0.1})
        failed = make_evaluation([math.nan] * 4, task="c", step=step)
        decisions.append(guard.observe(step, {**evaluations, "c": failed}))
    assert [d.judged_good for d in decisions] == [True] * 10 + [False]
    assert decisions[10].action is GuardAction.rollback
    alarms = [e for d in decisions for e in d.events if e.kind == "alarm"]
    assert [e.step for e in alarms] == [0]
    assert f"{blind} has had no value" in alarms[0].reason
    assert ("did you mean 'violation_rate'" in alarms[0].reason) == (blind != "c")


def test_a_declared_metric_without_a_value_is_no_misspelt_name() -> None:
    """Its reward may have returned None for every response."""
    guard = SafetyGuard(monitor_metrics=["verdict"])
    guard.bind(["a"], {"a": {"reward/verdict": True, "reward/form": True}})
    (alarm,) = guard.observe(0, _constant({"a": 0.6}, 0, {"reward/form": 0.1})).events
    assert alarm.reason == "a/reward/verdict has had no value up to step 0: nothing guards it"


def test_without_good_weights_to_compare_with_an_alarm_is_answered_as_without_a_fresh_evaluation() -> None:
    for confirm in (None, lambda task: None):
        guard, never_good = _guard(warmup=3), _guard(warmup=3)
        _run(guard, [0.6] * 10)
        decision = guard.observe(100, _constant({"a": 0.3, "b": 0.7}, 100), confirm)
        assert (decision.action, decision.statistics["z_limit"]) == (GuardAction.rollback, 2.33)
        for step in range(10):  # b is lost when a comes: no weights are good in both
            level = {"b": 0.7} if step == 0 else {"a": 0.6 if step < 9 else 0.3}
            decision = never_good.observe(step, _constant(level, step), confirm)
        assert decision.action is GuardAction.rollback
        assert "z" not in decision.statistics


def test_an_alarm_is_not_answered_while_its_task_has_no_evaluation() -> None:
    guard, same = _guard(), _constant({"a": 0.6}, 0)["a"]
    _run(guard, [0.6] * 10)
    guard.observe(100, _constant({"a": 0.3, "b": 0.7}, 100), confirm=lambda task: (same, same))
    decision = guard.observe(110, _constant({"b": 0.7}, 110))
    assert (decision.action, decision.judged_good) == (GuardAction.keep, False)


def test_state_round_trip_continues_identically() -> None:
    whole, actor = _guard(), Actor("ab", 1)
    evaluations = []
    for i in range(60):
        if i == 30:
            actor.skill["a"] = 0.35
        evaluations.append(actor.evaluate(i))
    for i in range(34):
        whole.record_step(i, {"a": _stats("a", 2, math.nan), "b": _stats("b", 3)})
        whole.observe(i, evaluations[i])
    assert whole.lr_factor(34) == 0.5
    resumed = _guard()
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for i in range(34, 60):
        assert resumed.observe(i, evaluations[i]) == whole.observe(i, evaluations[i])
    assert resumed.weight_factors() == whole.weight_factors()
    assert json.dumps(resumed.state_dict()) == json.dumps(whole.state_dict())


def test_resume_survives_added_removed_and_renamed_tasks() -> None:
    old = _guard("abc")
    for step in range(10):
        old.observe(step, _constant({"a": 0.6, "b": 0.7, "c": 0.8}, step))
    new = _guard("bzn")
    new.load_state_dict(old.state_dict(), renamed={"c": "z"})
    decision = new.observe(10, _constant({"b": 0.7, "z": 0.4, "n": 0.1}, 10))
    assert decision.action is GuardAction.rollback
    assert decision.task == "z"


def test_a_task_that_takes_the_name_of_a_removed_one_does_not_take_its_values() -> None:
    both, alone, renamed = _guard("ba"), _guard("b"), _guard("a")
    for step in range(5):
        both.observe(step, _constant({"b": 0.5, "a": 0.9}, step))
    alone.load_state_dict(both.state_dict())
    for step in range(5, 10):
        alone.observe(step, _constant({"b": 0.5}, step))
    renamed.load_state_dict(alone.state_dict(), renamed={"b": "a"})
    assert renamed.observe(10, _constant({"a": 0.2}, 10)).action is GuardAction.rollback
    good = [CheckpointInfo(step=step, judged_good=True) for step in range(10)]
    assert renamed.rollback_target(good) == good[8], "its values up to step 8 are as good as any before"


def test_unknown_task_and_bad_settings_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"'maths'.*did you mean 'math'"):
        SafetyGuard(monitor_metrics=["maths"]).bind({"math": True})
    with pytest.raises(ConfigError, match="threshold_delta"):
        SafetyGuard(threshold_delta=0.0)
    with pytest.raises(ConfigError, match="threshold_delta"):
        SafetyGuard(threshold_delta=-15)
    with pytest.raises(ConfigError, match="rollback_steps"):
        SafetyGuard(rollback_steps=0)
    with pytest.raises(ConfigError, match="cusum_limit"):
        SafetyGuard(cusumlimit=3)
    with pytest.raises(ConfigError, match="ladder"):
        SafetyGuard(ladder=["rollback", "reweight"])
    with pytest.raises(ConfigError, match="confirm_z"):
        SafetyGuard(confirm_z=-1.0)


def test_a_test_that_hardly_ever_acts_is_a_test_all_the_same() -> None:
    guard = _guard("abcdefgh", confirm_z=30.0)
    decisions = _run(guard, [0.6] * 8 + [0.5] * 3)
    assert [d.action for d in decisions] == [GuardAction.keep] * 11


def test_metrics_are_named_per_watched_metric() -> None:
    guard = _guard()
    _run(guard, [0.6] * 6)
    metrics = guard.metrics()
    assert metrics["guard/a/value"] == pytest.approx(0.6)
    assert metrics["guard/b/demonstrated"] < 0.7
    assert metrics["guard/judged_good"] == 1.0
