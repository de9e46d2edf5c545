"""Each controller together with each other one: does it still do what its page says?"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from loop_simulator import Loop, Skill

from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.guard.decision import GuardAction
from multitask_rl.guard.safety_guard import SafetyGuard


def _poisoned(seed: int = 0) -> Loop:
    """Updates of b cost a its skill from step 200 on, until that passage of b's data is over."""
    return Loop(
        skills={"a": Skill(level=0.6, top=0.7), "b": Skill(level=0.3), "c": Skill(level=0.6, top=0.7)},
        harm={"a": ("b", range(200, 235), 0.02)},
        seed=seed,
    )


def _level(loop: Loop, task: str) -> float:
    return loop.scheduler.metrics()[f"task/{task}/level"]


@pytest.mark.parametrize("seed", range(3))
def test_scheduler_and_guard_a_rollback_does_not_starve_the_victim(seed: int) -> None:
    loop = _poisoned(seed)
    loop.train(300, until=GuardAction.rollback)
    taken = len(loop.shares)
    assert 200 < taken < 300
    own = loop.scheduler.weights()["a"]
    factors = loop.guard.weight_factors()
    loop.scheduler.set_factors({})
    assert own > loop.scheduler.weights()["a"]
    loop.scheduler.set_factors(factors)
    assert _level(loop, "a") == pytest.approx(loop.rate("a"), abs=0.08), "levels follow the restored weights"
    loop.train(500)
    assert loop.rate("a") > 0.6
    assert min(share for shares in loop.shares[taken:] for share in shares.values()) >= 0.2 / 3 - 1e-9
    assert loop.guard.weight_factors() == {}


def test_scheduler_and_guard_a_frozen_task_is_not_called_unlearnable() -> None:
    loop = Loop(skills={name: Skill(level=0.4, speed=0.0) for name in "ab"}, evaluates=False)
    loop.train(50)
    loop.scheduler.set_factors({"a": 0.0})
    loop.train(500)
    assert not [e for e in loop.events if e.kind == "alarm"]
    assert loop.shares[-1] == {"a": 0.0, "b": 1.0}
    loop.skills["a"].level = 0.8  # what b teaches it shows in the evaluations only
    for step in range(500, 700, 50):
        loop.scheduler.calibrate({"a": 0.8}, step)
    assert _level(loop, "a") > 0.7
    loop.scheduler.set_factors({})
    assert loop.scheduler.weights()["a"] > 0.05


def test_scheduler_and_multiplier_a_constrained_task_is_neither_starved_nor_given_everything() -> None:
    loop = Loop(
        skills={
            "free": Skill(level=0.3),
            "bound": Skill(level=0.3, limit=0.1, violations=0.6, price=0.15),
            "other": Skill(level=0.5),
        }
    )
    loop.train(600)
    assert loop.skills["bound"].violations < 0.1
    assert all(loop.rate(task) > 0.75 for task in ("free", "other"))
    assert loop.rate("bound") > 0.7
    late = [shares["bound"] for shares in loop.shares[100:]]
    assert min(late) > 0.2 / 3
    assert not [e for e in loop.events if e.kind in ("rollback", "stop", "alarm")]


@pytest.mark.parametrize("by", ["half", "pass_rate"])
@pytest.mark.parametrize("spread", [0.3, 0.45])
def test_scheduler_and_curriculum_the_choice_of_prompts_does_not_move_the_level(
    by: str, spread: float
) -> None:
    """The hard half is always failed or the easy half always solved: draws go to the other."""
    for level in (spread, 1.0 - spread):
        loop = Loop(
            skills={
                "plain": Skill(level=level, speed=0.0, spread=spread),
                "pooled": Skill(level=level, speed=0.0, spread=spread, by=by),
            },
            evaluates=False,
        )
        loop.train(150)
        assert _level(loop, "pooled") == pytest.approx(level, abs=0.08)
        assert loop.scheduler.weights()["pooled"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("by", ["", "half"])
def test_scheduler_and_held_out_a_task_learnt_by_heart_is_not_taken_for_learnt(by: str) -> None:
    loop = Loop(
        skills={
            "known": Skill(level=0.4, speed=0.0, gap=0.3, spread=0.2, by=by),
            "fresh": Skill(level=0.4, speed=0.0, spread=0.2),
        }
    )
    loop.train(200)
    assert _level(loop, "known") == pytest.approx(0.4, abs=0.08)
    assert loop.scheduler.weights()["known"] == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize("seed", range(4))
def test_multiplier_and_guard_a_working_multiplier_is_not_rolled_back(seed: int) -> None:
    """Violations fall from .6 below the limit, which costs a tenth of the reward."""
    loop = Loop(
        skills={"bound": Skill(level=0.7, top=0.7, limit=0.1, violations=0.6, price=0.12)},
        guard=SafetyGuard(monitor_metrics=["bound", "bound/violation_rate"]),
        seed=seed,
    )
    before = loop.rate("bound")
    loop.train(400)
    assert loop.skills["bound"].violations < 0.1
    assert 0.85 * before < loop.rate("bound") < before
    assert not [event for event in loop.events if event.kind in ("rollback", "stop")]


def test_multiplier_and_guard_a_rollback_takes_the_multiplier_back_with_the_weights() -> None:
    loop = Loop(
        skills={"a": Skill(level=0.7, limit=0.1, violations=0.6), "b": Skill(level=0.5)},
        harm={"a": ("b", range(150, 185), 0.02)},
    )
    loop.train(260, until=GuardAction.rollback)
    assert loop.events[-1].kind == "rolled_back"
    saved = json.loads(loop.saved[loop.events[-1].data["to"]][0])
    assert loop.multipliers["a"].state_dict() == saved["multipliers"]["a"]
    assert loop.skills["a"].violations == saved["skills"]["a"]["violations"]
    loop.train(500)
    assert loop.skills["a"].violations < 0.1
    assert loop.rate("a") > 0.6


def _everything(seed: int = 1) -> Loop:
    return Loop(
        skills={
            "a": Skill(level=0.6, top=0.7, limit=0.1, violations=0.4, by="half", spread=0.2),
            "b": Skill(level=0.3, gap=0.1, by="pass_rate", spread=0.2),
            "c": Skill(level=0.05, speed=0.0005),
        },
        harm={"a": ("b", range(120, 155), 0.03)},
        scheduler=DynamicTaskWeightScheduler({"a": 1, "b": 2}),
        seed=seed,
    )


@pytest.mark.parametrize("build", [_everything, _poisoned])
@pytest.mark.parametrize("stops", [[1, 2, 93], [137, 150, 211]])
def test_a_resumed_loop_is_the_undisturbed_one(build: Callable[[], Loop], stops: list[int]) -> None:
    whole, part = build(), build()
    whole.train(260)
    shares = []
    for stop in [*stops, 260]:
        part.train(stop)
        shares += part.shares
        state = json.loads(json.dumps(part.state_dict()))
        part = build()
        part.load_state_dict(state)
    assert any(event.kind == "rolled_back" for event in whole.events)
    assert shares == whole.shares
    assert json.dumps(part.state_dict()) == json.dumps(whole.state_dict())
