"""The pure functions of the claims about the guard: what is found, restored, handed over. No training."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multitask_rl.records import Scored
from multitask_rl.testing.builders import make_evaluation, make_rollout

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _benchmarks_importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def _module(name: str) -> Any:
    return importlib.import_module(f"claims.{name}")


def _timeline(levels: list[float], *actions: tuple[int, str], delivered: float = math.nan) -> Any:
    return _module("guard").Timeline(levels=levels, actions=list(actions), delivered=delivered)


def _summarise(timeline: Any, limit: int = 5) -> dict[str, float]:
    result: dict[str, float] = _module("guard").summarise(timeline, limit=limit)
    return result


def test_a_fault_answered_in_time_and_undone_counts_as_found_and_restored() -> None:
    seen = _summarise(_timeline([0.9, 0.5, 1.0, 0.94, 0.97, 0.98], (1, "rollback")))
    assert (seen["detected"], seen["delay"], seen["recovered"]) == (1.0, 2.0, 1.0)
    assert (seen["rollbacks"], seen["stopped"], seen["level_end"]) == (1.0, 0.0, 0.98)


def test_the_fifth_evaluation_is_in_time_and_the_sixth_too_late() -> None:
    levels = [0.5] * 10
    assert _summarise(_timeline(levels, (4, "rollback")))["detected"] == 1.0
    late = _summarise(_timeline(levels, (5, "rollback")))
    assert (late["detected"], late["delay"]) == (0.0, 6.0)


def test_a_level_that_is_only_touched_is_not_restored() -> None:
    """Three evaluations in a row have to average 0.95: the restored weights fall again."""
    seen = _summarise(_timeline([0.4, 1.0, 0.8, 0.6, 0.5], (0, "rollback")))
    assert seen["recovered"] == 0.0


def test_a_recovery_after_more_than_a_hundred_steps_does_not_count() -> None:
    assert _summarise(_timeline([0.4] + [0.8] * 10 + [1.0] * 5, (0, "rollback")))["recovered"] == 0.0


def test_a_fault_without_answer_has_no_recovery() -> None:
    seen = _summarise(_timeline([0.9, 0.8, 0.7]))
    assert (seen["detected"], seen["level_end"]) == (0.0, 0.7)
    assert math.isnan(seen["delay"])
    assert math.isnan(seen["recovered"])


def test_a_stopped_run_is_worth_what_it_hands_over() -> None:
    seen = _summarise(_timeline([0.4, 0.3], (0, "rollback"), (1, "stop"), delivered=1.0))
    assert (seen["stopped"], seen["level_end"], seen["recovered"]) == (1.0, 1.0, 1.0)


def test_rate_interval_equals_wilsons() -> None:
    low, high = _module("guard").rate_interval(19, 20)  # Wilson 1927: 0.7639 .. 0.9911
    assert (low, high) == pytest.approx((0.7639, 0.9911), abs=1e-4)
    assert _module("guard").rate_interval(0, 20)[0] == 0.0


def test_the_guards_table_names_every_fault_its_counts_and_what_was_not_run() -> None:
    guard = _module("guard")
    seeds = [_summarise(_timeline([0.4, 1.0, 1.0, 1.0], (0, "rollback"))), _summarise(_timeline([0.9, 0.9]))]
    plants: dict[str, list[float]] = {"false_alarms_before": [0.0, 1.0]}
    for kind in (*guard.ABRUPT, *guard.SLOW):
        plants |= {f"{kind}/{key}": [own[key] for own in seeds] for key in seeds[0]}
        plants[f"{kind}/end_unguarded"] = [0.2, math.nan]
    clean = {"false_alarms": [0.0, 2.0], "evaluations": [201.0, 201.0]}
    text = guard.render({"plants": plants, "clean": clean})
    assert "| slow_leak | 1 of 2 | median 1, worst 1 | 1 of 1 | 0.95 (lowest 0.90) | 0.20" in text
    assert "Abrupt faults found within 5 evaluations: 4 of 8 (50%" in text
    assert "Alarms before the plant: 1 in 26 evaluations" in text
    assert "1 of 2 with an alarm, 402 evaluations" in text
    assert "flips_20" not in text  # a control that was not run
    assert "with an alarm" not in guard.render({"plants": plants})


def _plant(fault: dict[str, Any]) -> Any:
    return _module("plants").Plant(fault, victim="a", seed=0, trainer=None)


def _records(task: str, number: int) -> list[Scored]:
    return [Scored(rollout=make_rollout(task=task, draw=i), reward=1.0) for i in range(number)]


def test_a_flip_turns_the_victims_rewards_over_and_no_others() -> None:
    flipped = _plant({"flips": 1.0}).process([*_records("a", 3), *_records("b", 2)])
    assert [s.reward for s in flipped] == [0.0] * 3 + [1.0] * 2


def test_a_leak_grows_with_the_steps_made() -> None:
    plant = _plant({"flips": 1.0, "flips_over": 10})
    shares = [sum(s.reward == 0.0 for s in plant.process(_records("a", 400))) / 400 for _ in range(12)]
    assert shares[0] == 0.0
    assert shares[5] == pytest.approx(0.5, abs=0.1)
    assert shares[10:] == [1.0, 1.0]


def test_a_dropped_task_reaches_nobody() -> None:
    left = _plant({"drops": True}).process([*_records("a", 3), *_records("b", 2)])
    assert [s.rollout.task for s in left] == ["b", "b"]


def test_a_learning_rate_spike_lasts_its_steps_and_passes_through_the_guard() -> None:
    guard = _module("plants").GuardWithPlant(is_deaf=True)
    guard.plant = _plant({"lr_factor": 30.0, "lr_steps": 2})
    factors = []
    for _ in range(4):
        guard.plant.process([])
        factors.append(guard.lr_factor(0))
    assert factors == [30.0, 30.0, 1.0, 1.0]


def test_a_plant_needs_a_guard_that_knows_the_evaluations_before_it() -> None:
    """Else the guard warms up during the fault: so the claim ran for a while, and found no fault."""
    evaluations = {"a": make_evaluation([1.0] * 8 + [0.0] * 8, task="a")}
    guard, resumed = (_module("plants").GuardWithPlant() for _ in range(2))
    for one in (guard, resumed):
        one.bind(["a"])
        one.plant = _plant({"flips": 1.0})
    with pytest.raises(RuntimeError, match="no history"):
        guard.observe(0, evaluations)
    before = _module("plants").GuardWithPlant()
    before.bind(["a"])
    before.observe(0, evaluations)
    resumed.load_state_dict(before.state_dict())
    resumed.observe(10, evaluations)


def _history(golds: list[float], proxies: list[float]) -> list[tuple[int, dict[str, float]]]:
    return [
        (5 * i, {"reward/gold": gold, "reward/proxy": proxy, "length": 5.0 + i})
        for i, (gold, proxy) in enumerate(zip(golds, proxies, strict=True))
    ]


def test_over_optimisation_is_read_off_the_smoothed_curve() -> None:
    summarise = _module("overoptimisation").summarise
    history = _history([0.3, 0.6, 0.6, 0.6, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    run_out = summarise(history, {step: 0.5 * step for step in range(30)}, None)
    assert (run_out["gold_max"], run_out["gold_end"], run_out["ratio"]) == pytest.approx((0.6, 0.0, 0.0))
    assert (run_out["proxy_end"], run_out["kl"], run_out["length"]) == (6.0, 14.5, 11.0)
    stopped = summarise(history, {}, 15)
    assert (stopped["ratio"], stopped["steps"], stopped["steps_made"]) == pytest.approx((1.0, 15.0, 30.0))
    assert (stopped["proxy_end"], stopped["length"]) == (3.0, 8.0)
    back = [*history[:6], *_history([0.3, 0.6, 0.6, 0.3], [0.0, 1.0, 2.0, 3.0])[2:]]  # from 25 back to 5
    assert summarise(back, {}, 10)["gold_end"] == pytest.approx(0.5), "undone evaluations do not count"


def test_the_over_optimisation_table_counts_both_criteria() -> None:
    claim = _module("overoptimisation")
    base = {column: [1.0, 1.0] for column in claim.COLUMNS}
    arms = {
        "unguarded": {**base, "ratio": [0.2, 0.6], "gold_end": [0.2, 0.6]},
        "guarded": {**base, "ratio": [0.96, 0.9], "gold_end": [0.96, 0.9]},
    }
    lines = claim.render(arms).splitlines()
    assert lines[2].endswith("| 0 of 2 | 1 of 2 |")
    assert lines[3].endswith("| 1 of 2 | 0 of 2 |")
    assert any(line.startswith("- guarded: gold at the end is 0.93") for line in lines)
