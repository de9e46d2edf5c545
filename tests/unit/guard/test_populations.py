"""Every kind of watched metric over small populations (docs/simulate_guard_populations.py: the table)."""

import runpy
from pathlib import Path

import pytest

from multitask_rl.errors import ConfigError
from multitask_rl.guard.decision import GuardAction
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.records import Direction
from multitask_rl.statistics.intervals import summarise
from multitask_rl.testing import make_evaluation

SIMULATION = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "simulate_guard_populations.py"))
Cell, first_rollback = SIMULATION["Cell"], SIMULATION["first_rollback"]
CASES = [
    ("primary 0/1", 64, 0.5),
    ("primary real", 13, 0.5),
    ("violation_rate", 13, 0.3),
    ("violation_rate", 64, 0.02),
    ("cost", 13, 0.1),
    ("reward/<name>", 64, 0.3),
]


@pytest.mark.parametrize(("kind", "size", "rate"), CASES)
@pytest.mark.parametrize("fresh", [False, True])
def test_clean_runs_are_left_alone_and_falls_that_can_show_are_found(kind, size, rate, fresh) -> None:
    cell = Cell(kind, size, rate, fresh=fresh)
    assert [first_rollback(cell, seed, 60) for seed in range(4)] == [None] * 4
    found = [first_rollback(cell, 100 + seed, 50, fall=cell.fall()) for seed in range(4)]
    assert all(at is not None and 40 <= at < 50 for at in found)


@pytest.mark.parametrize(("kind", "rate", "gain"), [("violation_rate", 0.5, 0.48), ("cost", 0.5, 0.45)])
def test_training_that_works_is_no_regression(kind, rate, gain) -> None:
    """Violations from .50 to .02 were rolled back after five evaluations."""
    for fresh in (False, True):
        assert first_rollback(Cell(kind, 64, rate, 0.2, fresh), 0, 80, gain=gain) is None


def test_a_metric_without_a_direction_is_refused_until_one_is_stated() -> None:
    lengths = summarise([10.0, 20.0, 30.0, 40.0], keep=range(4))
    evaluation = make_evaluation([1.0, 0.0, 1.0, 0.0], task="a", metrics={"length": lengths})
    guard = SafetyGuard(monitor_metrics=["a/length"])
    guard.bind(["a"])
    with pytest.raises(ConfigError, match=r"directions\.length=higher \(or lower\)"):
        guard.observe(0, {"a": evaluation})
    stated = SafetyGuard(monitor_metrics=["a/length"], directions={"length": "lower"})
    stated.bind(["a"])
    assert stated.observe(0, {"a": evaluation}).action is GuardAction.keep
    assert stated.metrics()["guard/a/length/value"] == -25.0
    with pytest.raises(ConfigError, match=r"directions\.length must be one of higher, lower, got 'up'"):
        SafetyGuard(directions={"length": "up"})


METRICS = {
    "a": {"reward_mean": True, "reward/exact": True, "length": False},
    "b": {"reward_mean": True, "reward/fluency": True, "length": False},
}


def bind(*entries: str) -> None:
    SafetyGuard(monitor_metrics=list(entries)).bind(list(METRICS), METRICS)


def test_what_no_task_has_is_refused_before_an_evaluation():
    with pytest.raises(ConfigError, match=r"'a/fluency' .*a has: length, reward/exact, reward_mean"):
        bind("a/fluency")
    with pytest.raises(ConfigError, match=r"'exactt' .* did you mean 'exact'.*a: .*reward/exact"):
        bind("exactt")
    with pytest.raises(ConfigError, match=r"directions\.length=higher \(or lower\)"):
        bind("a/length")
    with pytest.raises(ConfigError, match=r"directions\.reward/exact/time=higher \(or lower\)"):
        bind("a/reward/exact/time")


def test_a_metric_is_found_in_the_tasks_that_have_it():
    guard = SafetyGuard(monitor_metrics=["fluency", "length", "b"], directions={"length": "lower"})
    guard.bind(list(METRICS), METRICS)
    evaluations = {
        task: make_evaluation(
            [1.0, 0.0],
            task=task,
            metrics={n: summarise([0.0, 1.0], direction=Direction.higher, keep=range(2)) for n in own},
        )
        for task, own in METRICS.items()
    }
    guard.observe(0, evaluations)
    seen = {name.removeprefix("guard/").removesuffix("/value") for name in guard.metrics() if "value" in name}
    assert seen == {"b", "b/reward/fluency", "a/length", "b/length"}


def test_directions_come_with_the_metric_and_not_from_its_name() -> None:
    """A metric of any name falls in its own direction."""
    for direction, levels in ((Direction.higher, (0.9, 0.3)), (Direction.lower, (0.1, 0.7))):
        guard = SafetyGuard(monitor_metrics=["a/kl"])
        guard.bind(["a"])
        actions = []
        for step in range(14):
            rate = levels[step >= 12]
            own = summarise([float(i < 200 * rate) for i in range(200)], direction=direction, keep=range(200))
            evaluation = make_evaluation([1.0, 0.0], task="a", step=step, metrics={"kl": own})
            actions.append(guard.observe(step, {"a": evaluation}).action)
        assert GuardAction.rollback not in actions[:12]
        assert GuardAction.rollback in actions[12:]
