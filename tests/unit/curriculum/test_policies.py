from __future__ import annotations

import math

import pytest

from multitask_rl.curriculum.base import SchedulerPolicy, softmax
from multitask_rl.curriculum.deficit_learnability import DeficitLearnability
from multitask_rl.curriculum.patience import Patience, PatienceConfig
from multitask_rl.curriculum.signal import TaskTrace
from multitask_rl.records import TaskStats


def _stats(task: str, reward: float, *, informative: int = 4, std: float = 0.0) -> TaskStats:
    return TaskStats(
        task=task, num_prompts=8, num_informative=informative, reward_mean=reward, reward_std=std
    )


def _build(
    cls: type[SchedulerPolicy], tasks: str = "ab", targets: dict[str, float] | None = None, **config: object
) -> SchedulerPolicy:
    return cls(cls.Config(**config), list(tasks), dict.fromkeys(tasks, 1.0), targets or {})


def test_deficit_learnability_equals_the_formula() -> None:
    policy = _build(DeficitLearnability, "abc", {"a": 0.9})
    policy.update(
        {
            "a": _stats("a", 0.5, informative=2),
            "b": _stats("b", 0.2, informative=8),
            "c": _stats("c", 0.0, informative=0),
        },
        0,
    )
    scores = {"a": 0.4 * math.sqrt(0.25), "b": 0.8, "c": 1.0 * math.sqrt(0.02)}
    total = sum(scores.values())
    assert policy.weights() == pytest.approx({t: s / total for t, s in scores.items()})


def test_deficit_learnability_smooths_with_a_bias_corrected_start() -> None:
    policy = _build(DeficitLearnability, "a", smoothing=0.5)
    for step, reward in enumerate((0.2, 0.6, 1.0)):
        policy.update({"a": _stats("a", reward)}, step)
    # gains 1, 1/2, max(.5, 1/3): .2, .4, .7
    assert policy.level("a") == pytest.approx(0.7)


def test_all_tasks_at_their_targets_falls_back_to_the_prior() -> None:
    policy = DeficitLearnability(
        DeficitLearnability.Config(), ["a", "b"], {"a": 3, "b": 1}, {"a": 0.5, "b": 0.5}
    )
    policy.update({"a": _stats("a", 0.9), "b": _stats("b", 0.9)}, 0)
    assert policy.weights() == {"a": 0.75, "b": 0.25}


def test_a_task_not_seen_yet_keeps_its_prior_share() -> None:
    policy = _build(DeficitLearnability, "abcd")
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


@pytest.mark.parametrize(
    ("key", "value"), [("patience", 0), ("factor", 1.0), ("max_change", 1.0), ("smoothing", 0.0)]
)
def test_values_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        PatienceConfig(**{key: value})  # type: ignore[arg-type]


def _observe(
    trace: TaskTrace, mean: float, std: float = 0.0, known: tuple[float, float] | None = None
) -> float:
    signal = trace.observe(
        _stats("a", mean, std=std), metric_key="reward_score", smoothing=0.1, known_range=known
    )
    assert signal is not None
    return signal.level


def test_reward_in_the_unit_interval_is_its_own_level() -> None:
    trace = TaskTrace()
    assert _observe(trace, 0.3, std=0.5) == 0.3
    assert trace.level(None) == 0.3


def test_reward_outside_is_placed_in_the_demonstrated_range() -> None:
    trace = TaskTrace()
    assert _observe(trace, -50.0, std=10.0) == 0.5  # between -70 and -30
    assert _observe(trace, -30.0, std=5.0) == pytest.approx((-30 + 70) / (-20 + 70))


def test_known_range_makes_levels_invariant_to_scale_and_shift() -> None:
    plain, scaled = TaskTrace(), TaskTrace()
    for mean in (0.1, 0.4, 0.35, 0.8):
        _observe(plain, mean)
        _observe(scaled, 100 * mean + 7, known=(7.0, 107.0))
        assert plain.level(None) == pytest.approx(scaled.level((7.0, 107.0)))


def test_progress_is_measured_on_one_scale_when_the_scale_changes() -> None:
    trace = TaskTrace()
    for _ in range(3):
        _observe(trace, 0.5, std=0.1)
    signal = trace.observe(
        _stats("a", 1.5, std=0.1), metric_key="reward_score", smoothing=0.1, known_range=None
    )
    assert signal is not None
    assert signal.progress == pytest.approx(0.25 * (1.5 - 0.5) / (1.7 - 0.3))


def test_softmax_survives_large_logits() -> None:
    assert softmax({"a": 1000.0, "b": 1000.0, "c": -1000.0}) == {"a": 0.5, "b": 0.5, "c": 0.0}
