from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from multitask_rl.curriculum.bandit import Bandit
from multitask_rl.curriculum.base import SchedulerPolicy, softmax
from multitask_rl.curriculum.deficit_learnability import DeficitLearnability
from multitask_rl.curriculum.learnability import Learnability
from multitask_rl.curriculum.mt_grpo import MTGRPO
from multitask_rl.curriculum.patience import Patience
from multitask_rl.curriculum.signal import TaskTrace
from multitask_rl.curriculum.straggler import Straggler
from multitask_rl.curriculum.tac import TAC
from multitask_rl.records import TaskStats

MANY = 10**9
"""Prompts of a step after which a level is known exactly: what is left is the policy's rule."""


def _stats(
    task: str, reward: float, *, informative: float = 0.5, std: float = 0.0, num_prompts: int = MANY
) -> TaskStats:
    return TaskStats(
        task=task,
        num_prompts=num_prompts,
        num_informative=round(informative * num_prompts),
        reward_mean=reward,
        reward_std=std,
    )


def _build(
    cls: type[SchedulerPolicy], tasks: str = "ab", targets: dict[str, float] | None = None, **config: object
) -> SchedulerPolicy:
    unit = dict.fromkeys(tasks, (0.0, 1.0))
    return cls(cls.Config(**config), list(tasks), dict.fromkeys(tasks, 1.0), targets or {}, unit)


def test_deficit_learnability_equals_the_formula() -> None:
    policy = _build(DeficitLearnability, "abc", {"a": 0.9})
    policy.update(
        {
            "a": _stats("a", 0.5, informative=0.125),
            "b": _stats("b", 0.2, informative=0.5),
            "c": _stats("c", 0.0, informative=0.0),
        },
        0,
    )
    # a quarter of the groups is enough: b loses nothing
    scores = {"a": 0.4 * math.sqrt(0.125 / 0.25), "b": 0.8, "c": 1.0 * math.sqrt(0.02 / 0.25)}
    powers = {t: s**policy.config.sharpness for t, s in scores.items()}
    total = sum(powers.values())
    assert policy.weights() == pytest.approx({t: s / total for t, s in powers.items()}, rel=1e-3)


@pytest.mark.parametrize("sharpness", [1.0, 8.0, 60.0])
def test_deficit_learnability_ranks_alike_at_every_sharpness(sharpness: float) -> None:
    policy = _build(DeficitLearnability, "abc", sharpness=sharpness)
    policy.update({"a": _stats("a", 0.2), "b": _stats("b", 0.5), "c": _stats("c", 0.999999)}, 0)
    weights = policy.weights()
    assert weights["a"] > weights["b"] > weights["c"] >= 0.0
    assert sum(weights.values()) == pytest.approx(1.0)
    if sharpness == 1.0:
        assert weights["a"] / weights["b"] == pytest.approx(0.8 / 0.5)


@pytest.mark.parametrize("sharpness", [1.0, 8.0, 60.0])
def test_a_weight_given_by_the_user_acts_in_proportion_at_every_sharpness(sharpness: float) -> None:
    config = DeficitLearnability.Config(sharpness=sharpness)
    policy = DeficitLearnability(config, ["a", "b"], {"a": 2.0, "b": 1.0}, {})
    policy.update({"a": _stats("a", 0.4), "b": _stats("b", 0.4)}, 0)
    assert policy.weights() == pytest.approx({"a": 2 / 3, "b": 1 / 3})


def test_deficit_learnability_smooths_with_a_bias_corrected_start() -> None:
    policy = _build(DeficitLearnability, "a", smoothing=0.5, prompts_averaged=1)
    for step, reward in enumerate((0.2, 0.6, 1.0)):
        policy.update({"a": _stats("a", reward)}, step)
    # gains 1, 1/2, max(.5, 1/3): .2, .4, .7
    assert policy.traces["a"].level == pytest.approx(0.7)


def test_held_out_rewards_correct_the_level() -> None:
    policy = _build(DeficitLearnability, "ab")
    policy.calibrate({"a": 0.1})
    assert policy.traces["a"].level == policy.traces["b"].level  # nothing was trained yet
    policy.update({"a": _stats("a", 0.8), "b": _stats("b", 0.8)}, 0)
    policy.calibrate({"a": 0.6, "b": math.nan, "elsewhere": 0.0})
    assert (policy.traces["a"].level, policy.traces["b"].level) == (pytest.approx(0.6), pytest.approx(0.8))
    policy.calibrate({"a": 0.7})  # the second one counts for a half, like in a mean
    assert policy.traces["a"].level == pytest.approx(0.65)
    policy.update({"a": _stats("a", 0.9)}, 1)
    assert policy.traces["a"].level == pytest.approx(0.65 + 0.05)  # and what training adds is added
    watched = _build(DeficitLearnability, "a", metric_key="accuracy")
    watched.calibrate({"a": 0.1})
    assert watched.traces["a"].evaluations == 0


def test_a_step_with_few_prompts_counts_for_less() -> None:
    policy = _build(DeficitLearnability, "ab", smoothing=0.5, prompts_averaged=32)
    for step in range(8):
        stats = {"a": _stats("a", 0.5, num_prompts=8), "b": _stats("b", 0.5, num_prompts=32)}
        policy.update(stats, step)
    policy.update({"a": _stats("a", 0.9, num_prompts=8), "b": _stats("b", 0.9, num_prompts=32)}, 8)
    assert policy.traces["a"].level == pytest.approx(0.5 + 0.4 * 8 / 32)
    assert policy.traces["b"].level == pytest.approx(
        0.5 + 0.4 * 0.5
    )  # smoothing is the most a step can count


def test_all_tasks_at_their_targets_falls_back_to_the_prior() -> None:
    policy = DeficitLearnability(
        DeficitLearnability.Config(), ["a", "b"], {"a": 3, "b": 1}, {"a": 0.5, "b": 0.5}
    )
    policy.update({"a": _stats("a", 0.9), "b": _stats("b", 0.9)}, 0)
    assert policy.weights() == {"a": 0.75, "b": 0.25}


def test_a_task_not_seen_yet_keeps_its_prior_share() -> None:
    policy = _build(DeficitLearnability, "abcd", sharpness=1.0)
    policy.update({"a": _stats("a", 0.0), "b": _stats("b", 0.5)}, 0)
    assert policy.weights() == pytest.approx({"a": 1 / 3, "b": 1 / 6, "c": 0.25, "d": 0.25})


def _plateau(policy: SchedulerPolicy, levels: dict[str, float], steps: int) -> dict[str, float]:
    for step in range(steps):
        policy.update({t: _stats(t, level) for t, level in levels.items()}, step)
    return policy.weights()


def test_patience_lowers_a_plateau_at_the_target_and_raises_one_below() -> None:
    policy = _build(Patience, "ab", {"a": 0.8, "b": 0.8}, patience=10, factor=0.5)
    weights = _plateau(policy, {"a": 0.9, "b": 0.2}, 11)  # the first step sets the best, ten more wait
    assert weights == pytest.approx({"a": 0.5 / 2.5, "b": 2 / 2.5})


def test_literal_patience_lowers_the_stuck_task_too() -> None:
    policy = _build(Patience, "ab", {"a": 0.8, "b": 0.8}, patience=10, factor=0.5, literal=True)
    for step in range(11):  # a improves, b is stuck below its target
        policy.update({"a": _stats("a", 0.1 + 0.05 * step), "b": _stats("b", 0.2)}, step)
    assert policy.weights()["b"] == pytest.approx(0.5 / 1.5)


def test_patience_moves_nothing_while_both_improve() -> None:
    policy = _build(Patience, "ab", patience=10)
    for step in range(60):
        policy.update({t: _stats(t, 0.015 * step) for t in "ab"}, step)
    assert policy.weights() == {"a": 0.5, "b": 0.5}


def test_patience_is_bounded() -> None:
    policy = _build(Patience, "ab", {"a": 0.5}, patience=1, max_change=3.0)
    weights = _plateau(policy, {"a": 0.9, "b": 0.1}, 100)
    assert weights == pytest.approx({"a": 0.1, "b": 0.9})


def test_straggler_weighs_the_part_of_the_way_that_is_left() -> None:
    policy = _build(Straggler, "ab", {"a": 0.9}, smoothing=1.0, exponent=2.0)
    for step in range(10):
        policy.update({"a": _stats("a", 0.1), "b": _stats("b", 0.2)}, step)
    assert policy.weights() == {"a": 0.5, "b": 0.5}
    for step in range(1, 101):
        stats = {"a": _stats("a", 0.1 + 0.006 * step), "b": _stats("b", 0.2 + 0.004 * step)}
        policy.update(stats, 9 + step)
    # a has .2 of .8 left = 1/4, b .4 of .8 = 1/2: squares 1 to 4
    assert policy.weights() == pytest.approx({"a": 0.2, "b": 0.8}, rel=0.01)


def test_straggler_gives_nothing_to_a_task_that_starts_or_ends_at_its_target() -> None:
    policy = _build(Straggler, "ab", {"a": 0.5})
    for step in range(12):
        policy.update({"a": _stats("a", 0.6), "b": _stats("b", 0.2)}, step)
    assert policy.weights() == pytest.approx({"a": 0.0, "b": 1.0}, abs=1e-6)


def test_mt_grpo_equals_one_hand_computed_step() -> None:
    policy = _build(MTGRPO, "ab", smoothing=1.0, rate=2.0, level_weight=0.5)
    policy.update({"a": _stats("a", 0.8), "b": _stats("b", 0.2)}, 0)
    # scores .4 and .1 under z = 1/2: mean .25; logits move by -2 * .5 * (+-.15)
    assert policy.weights()["a"] == pytest.approx(1 / (1 + math.exp(0.3)))
    policy.update({"a": _stats("a", 0.8), "b": _stats("b", 0.25)}, 1)
    z = 1 / (1 + math.exp(0.3))
    scores, gap = {"a": 0.4, "b": 0.05 + 0.125}, 0.3  # b improved by .05: it counts as better off
    mean = z * scores["a"] + (1 - z) * scores["b"]
    gap += 2 * (z * (scores["a"] - mean) - (1 - z) * (scores["b"] - mean))
    assert policy.weights()["a"] == pytest.approx(1 / (1 + math.exp(gap)), rel=1e-2)


def test_mt_grpo_moves_to_the_worst_task_until_levels_meet() -> None:
    policy = _build(MTGRPO, "ab")
    for step in range(100):
        policy.update({"a": _stats("a", 0.8), "b": _stats("b", 0.2)}, step)
    assert policy.weights()["b"] > 0.9


def test_learnability_equals_the_formula_and_prefers_middling_difficulty() -> None:
    policy = _build(Learnability, "abc", smoothing=0.5, temperature=0.1)
    spreads = {"a": 0.5, "b": 0.3, "c": 0.0}
    policy.update({t: _stats(t, 0.5, std=s) for t, s in spreads.items()}, 0)
    assert policy.weights() == pytest.approx(softmax(spreads, 0.1), rel=1e-4)


def test_a_task_of_one_response_a_prompt_is_not_measured_as_one_without_spread() -> None:
    policy = _build(Learnability, "abc", smoothing=0.5, temperature=0.1)
    for step in range(3):
        stats = {"a": _stats("a", 0.5, std=0.5), "b": _stats("b", 0.1, std=0.3)}
        stats["c"] = _stats("c", 0.5, std=math.nan)  # as of a 0/1 reward: sqrt(p (1 - p))
        if step == 1:  # a step in which all responses but one of each group failed
            stats["a"] = _stats("a", 0.5, std=math.nan)
        policy.update(stats, step)
    assert policy.weights() == pytest.approx(softmax({"a": 0.5, "b": 0.3, "c": 0.5}, 0.1), rel=1e-4)


def _with_cosines(stats: dict[str, TaskStats], cosines: dict[str, float]) -> dict[str, TaskStats]:
    """Return ``stats`` with the cosine of each pair, named by its two letters, at both tasks."""
    more = {t: {f"cosine/{p.replace(t, '')}": c for p, c in cosines.items() if t in p} for t in stats}
    return {t: replace(own, metrics={**own.metrics, **more[t]}) for t, own in stats.items()}


def test_tac_equals_the_formula_and_is_learnability_without_cosines() -> None:
    spreads = {"a": 0.4, "b": 0.4, "c": 0.3}
    settings = {"smoothing": 0.5, "temperature": 0.1}
    stats = {t: _stats(t, 0.5, std=s) for t, s in spreads.items()}
    tac, plain = _build(TAC, "abc", alpha=2.0, **settings), _build(Learnability, "abc", **settings)
    for policy in (tac, plain):
        policy.update(stats, 0)
    assert tac.weights() == plain.weights()
    for step in range(1, 2_001):  # the same cosines again and again are certain
        tac.update(_with_cosines(stats, {"ab": 0.5, "ac": 0.1, "bc": -0.9}), step)
    assert isinstance(tac, TAC)
    assert max(tac.transfer_error(t) for t in "abc") < 0.02
    transfer = {"a": 0.3, "b": -0.2, "c": -0.4}
    assert tac.transfer == pytest.approx(transfer)
    scores = {t: spreads[t] * (1.0 + 2.0 * transfer[t]) for t in "abc"}
    assert tac.weights() == pytest.approx(softmax(scores, 0.1), rel=0.05)


def test_tac_follows_planted_transfer_through_noise_and_goes_on_as_it_was() -> None:
    planted = {"ab": 0.3, "ac": 0.3, "ad": 0.0, "bc": 0.0, "bd": -0.3, "cd": -0.3}
    stream, tac, still = random.Random(0), _build(TAC, "abcd"), _build(TAC, "abcd")
    again: SchedulerPolicy | None = None
    for step in range(400):
        stats = {t: _stats(t, 0.5, std=0.4, num_prompts=100) for t in "abcd"}
        noise = {pair: stream.gauss(0.0, 0.2) for pair in planted}
        tac.update(_with_cosines(stats, {p: c + noise[p] for p, c in planted.items()}), step)
        still.update(_with_cosines(stats, noise), step)
        if step == 200:
            again = _build(TAC, "abcd")
            again.load_state_dict(tac.state_dict())
        elif again is not None:
            again.update(_with_cosines(stats, {p: c + noise[p] for p, c in planted.items()}), step)
    shares = tac.weights()
    assert shares["a"] > 0.35 > 0.2 > shares["d"]
    assert still.weights() == pytest.approx(dict.fromkeys("abcd", 0.25), abs=0.05)
    assert again is not None
    assert again.weights() == shares


def test_bandit_is_paid_in_progress_and_keeps_exploring() -> None:
    policy = _build(Bandit, "ab", smoothing=1.0, rate=0.1, share=0.0, exploration=0.2)
    for step, reward in enumerate((0.1, 0.2, 0.3)):
        policy.update({"a": _stats("a", reward), "b": _stats("b", 0.5)}, step)
    # two steps of gain 1 for a, 0 for b
    assert policy.weights()["a"] == pytest.approx(0.8 / (1 + math.exp(-0.2)) + 0.1)
    for step in range(600):
        policy.update({"a": _stats("a", 0.3 + 0.001 * step), "b": _stats("b", 0.5)}, step)
    assert policy.weights()["a"] == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize("cls", [Straggler, MTGRPO, Learnability, Bandit, TAC])
@pytest.mark.parametrize("key", ["smoothing", "exponent", "rate", "temperature", "alpha"])
def test_negative_settings_are_refused(cls: type[SchedulerPolicy], key: str) -> None:
    if key in cls.Config.__dataclass_fields__:
        with pytest.raises(ValueError, match=key):
            cls.Config(**{key: -1.0})


@pytest.mark.parametrize(
    ("key", "value"), [("patience", 0), ("factor", 1.0), ("max_change", 1.0), ("smoothing", 0.0)]
)
def test_values_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        Patience.Config(**{key: value})  # type: ignore[arg-type]


def _observe(trace: TaskTrace, mean: float, std: float = 0.0) -> float:
    trace.observe(_stats("a", mean, std=std), metric_key="reward_score", smoothing=0.1)
    return trace.level


def test_a_reward_declared_in_the_unit_interval_is_its_own_level() -> None:
    trace = TaskTrace(known_range=(0.0, 1.0))
    assert _observe(trace, 0.3, std=0.5) == 0.3
    assert trace.level == 0.3


def test_an_undeclared_reward_is_placed_in_the_range_that_three_groups_have_shown() -> None:
    trace = TaskTrace()
    stats = _stats("a", -50.0, std=10.0)
    stats.lowest, stats.highest = [-90.0, -80.0, -70.0], [-10.0, -20.0, -30.0]
    trace.observe(stats, metric_key="reward_score", smoothing=0.1)
    assert trace.level == 0.5  # between -70 and -30
    stats.lowest, stats.highest = [-85.0, -60.0, -60.0], [-25.0, -25.0, -25.0]
    trace.observe(stats, metric_key="reward_score", smoothing=0.1)
    assert trace.level == pytest.approx((-50 + 80) / (-25 + 80))


def test_where_only_means_are_given_two_deviations_stand_for_the_range() -> None:
    trace = TaskTrace()
    assert _observe(trace, -50.0, std=10.0) == 0.5


def test_rewards_that_have_not_differed_yet_are_taken_to_be_in_the_unit_interval() -> None:
    trace = TaskTrace()
    assert _observe(trace, 0.0) == 0.0
    solved = TaskTrace()
    assert _observe(solved, 1.0) == 1.0


def test_known_range_makes_levels_invariant_to_scale_and_shift() -> None:
    plain, scaled = TaskTrace(known_range=(0.0, 1.0)), TaskTrace(known_range=(7.0, 107.0))
    for mean in (0.1, 0.4, 0.35, 0.8):
        _observe(plain, mean)
        _observe(scaled, 100 * mean + 7)
        assert plain.level == pytest.approx(scaled.level)


def test_progress_is_measured_on_one_scale_when_the_scale_changes() -> None:
    trace = TaskTrace()
    for _ in range(3):
        _observe(trace, 0.5, std=0.1)
    for _ in range(3):
        before = trace.raw.value
        progress = trace.observe(_stats("a", 1.5, std=0.1), metric_key="reward_score", smoothing=0.1)
    assert (trace.shown.lowest, trace.shown.highest) == (pytest.approx([0.3] * 3), pytest.approx([1.7] * 3))
    assert progress == pytest.approx((trace.raw.value - before) / (1.7 - 0.3))


def test_softmax_survives_large_logits() -> None:
    assert softmax({"a": 1000.0, "b": 1000.0, "c": -1000.0}) == {"a": 0.5, "b": 0.5, "c": 0.0}


def test_deficit_learnability_holds_back_a_task_whose_groups_differ_in_form_alone() -> None:
    policy = _build(DeficitLearnability, "abcd")
    policy.update(
        {
            "a": replace(_stats("a", 0.05), headroom=0.05),
            "b": replace(_stats("b", 0.05), headroom=0.5),
            "c": replace(_stats("c", 0.05), headroom=math.nan),  # groups of one
            "d": replace(_stats("d", 0.5, informative=0.0), headroom=0.0),
        },
        0,
    )
    weights = policy.weights()
    assert weights["b"] == pytest.approx(weights["c"])
    # half of the groups are informative: their best exceeds the others by 0.1 of a distance of 0.95
    factor = 0.1 / (0.25 * 0.95)
    assert weights["a"] / weights["b"] == pytest.approx(factor**policy.config.sharpness, rel=1e-3)
    assert weights["d"] < weights["a"]


def test_the_last_bit_of_a_level_at_its_target_moves_no_share() -> None:
    """A task whose rewards never differ has no headroom; its score is known to half of its deficit."""
    shares = []
    for target in (0.5, 0.5 + 1e-15):
        policy = _build(DeficitLearnability, "abc", {"a": target})
        for step in range(3):
            seen = {
                "a": replace(_stats("a", 0.5, informative=0.0, num_prompts=40), headroom=0.0),
                "b": replace(_stats("b", 0.3, num_prompts=40, std=0.4), headroom=0.4),
                "c": replace(_stats("c", 0.9, num_prompts=40, std=0.4), headroom=0.3),
            }
            policy.update(seen, step)
        shares.append(policy.weights())
    assert shares[0]["b"] > 0.5
    assert shares[1] == pytest.approx(shares[0], abs=1e-6)


def test_the_last_bit_of_a_quarter_of_groups_moves_no_share() -> None:
    """A mean over groups that comes out below 1/4 by rounding is enough, and the score as certain."""
    shares, rates = [], []
    for informative in ((0, 1, 2), (0, 1, 11)):
        policy = _build(DeficitLearnability, "ab")
        for step in range(12):
            is_informative = float(step in informative)
            seen = {
                "a": _stats("a", 0.3, informative=is_informative, num_prompts=1),
                "b": _stats("b", 0.6, num_prompts=40),
            }
            policy.update(seen, step)
        rates.append(policy.traces["a"].informative)
        shares.append(policy.weights())
    assert rates[0] < 0.25 == rates[1]
    assert shares[0] == pytest.approx(shares[1], abs=1e-9)


def test_the_score_of_a_task_is_made_anew_after_steps_evaluations_and_a_resume() -> None:
    policy, other = (_build(DeficitLearnability, "ab") for _ in range(2))
    for step in range(4):
        policy.update({"a": _stats("a", 0.2 + 0.1 * step)}, step)
        policy.update({"b": _stats("b", 0.5)}, step)
        policy.weights()
    policy.calibrate({"a": 0.1, "b": 0.6})
    other.weights()
    other.load_state_dict(policy.state_dict())
    assert policy.weights() == other.weights()
    assert policy.weights()["a"] > 0.9


@pytest.mark.parametrize(
    "cls",
    [DeficitLearnability, MTGRPO, Straggler, Learnability, Bandit, TAC, Patience],
    ids=lambda c: c.__name__,
)
def test_after_a_resume_shares_are_in_proportion_to_the_new_weights(cls: type[SchedulerPolicy]) -> None:
    same = {task: _stats(task, 0.4, num_prompts=16) for task in "abc"}

    def resumed(weights: dict[str, float]) -> SchedulerPolicy:
        unit = dict.fromkeys(weights, (0.0, 1.0))
        policy = cls(cls.Config(), list(weights), weights, {}, unit)
        policy.load_state_dict(state, {})
        for step in range(400):
            policy.update({task: same[task] for task in weights}, step)
        return policy

    before = _build(cls)
    for step in range(400):
        before.update({task: same[task] for task in "ab"}, step)
    state = json.loads(json.dumps(before.state_dict()))
    assert resumed({"a": 3.0, "b": 1.0}).weights() == pytest.approx({"a": 0.75, "b": 0.25}, rel=1e-3)
    third = 1.0 / 3.0
    assert resumed(dict.fromkeys("abc", 1.0)).weights() == pytest.approx(
        dict.fromkeys("abc", third), rel=1e-3
    )


def test_a_new_target_is_compared_with_the_level_that_a_task_began_at() -> None:
    before = _build(Straggler, targets={"a": 0.5})
    for step in range(60):
        before.update({task: _stats(task, 0.1 + 0.3 * min(step, 40) / 40) for task in "ab"}, step)
    after = _build(Straggler)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())), {})
    assert after.weights() == pytest.approx({"a": 0.5, "b": 0.5})
