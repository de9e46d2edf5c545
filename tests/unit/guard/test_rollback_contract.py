"""Guard and scheduler in a run: a stand-in for the actor, everything else as the trainer does it.

Reading a poisoned stretch of task ``b``'s data costs task ``a`` its ability. The run may only get past it by
going back *and* changing something; restoring alone reads the same stretch again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.guard.decision import CheckpointInfo, GuardAction
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.records import Event, TaskEvaluation, TaskStats
from multitask_rl.testing import make_evaluation

EVERY = 10
POISON = range(2000, 2600)
"""Prompts of task b."""


@dataclass
class Run:
    """Skills that rise with practice, checkpoints, cursors, and the trainer's side of the guard."""

    guard: SafetyGuard
    seed: int = 0
    skill: dict[str, float] = field(default_factory=lambda: {"a": 0.6, "b": 0.6})
    cursor: dict[str, int] = field(default_factory=lambda: {"a": 0, "b": 0})
    saved: dict[int, tuple[dict[str, Any], bool]] = field(default_factory=dict)
    history: list[tuple[int, GuardAction]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        self.scheduler = DynamicTaskWeightScheduler(policy="uniform")
        self.scheduler.bind(["a", "b"])
        self.guard.bind({"a": True, "b": True})
        self.stream = np.random.default_rng(self.seed)
        self.difficulty = self.stream.random(256)

    def train_step(self) -> None:
        stats = {}
        rate = self.guard.lr_factor(self.step)
        for task, n in self.scheduler.quotas(32).items():
            seen = range(self.cursor[task], self.cursor[task] + n)
            self.cursor[task] += n
            if task == "b":
                self.skill["a"] *= 1 - 0.002 * rate * len(set(seen) & set(POISON))
            self.skill[task] += 0.0002 * rate * n * (0.9 - self.skill[task])
            stats[task] = TaskStats(task=task, num_prompts=n, num_informative=n, reward_mean=self.skill[task])
        self.scheduler.update(stats, self.step)
        self.guard.record_step(self.step, stats)
        self.step += 1

    def evaluate(self) -> dict[str, TaskEvaluation]:
        redrawn = self.stream.random(256) < 0.2
        outcomes = {}
        for task, skill in self.skill.items():
            solved = np.where(redrawn, self.stream.random(256) < skill, self.difficulty < skill)
            outcomes[task] = make_evaluation(solved.tolist(), task=task, step=self.step)
        return outcomes

    def judge(self) -> None:
        decision = self.guard.observe(self.step, self.evaluate())
        self.history.append((self.step, decision.action))
        self.events += decision.events
        if decision.action is GuardAction.rollback:
            infos = [CheckpointInfo(step=s, judged_good=good) for s, (_, good) in self.saved.items()]
            target = self.guard.rollback_target(infos)
            assert target is not None
            state = self.saved[target.step][0]
            self.skill, self.step = dict(state["skill"]), target.step
            self.scheduler.load_state_dict(state["scheduler"])
            if not decision.adjustments.skip_data:
                self.cursor = dict(state["cursor"])
            self.saved = {s: kept for s, kept in self.saved.items() if s <= target.step}
            self.events += self.guard.rolled_back(target, step=self.step)
        else:
            state = {
                "skill": dict(self.skill),
                "cursor": dict(self.cursor),
                "scheduler": self.scheduler.state_dict(),
            }
            self.saved[self.step] = (state, decision.judged_good)
        self.scheduler.set_factors(self.guard.weight_factors())

    def train(self, steps: int) -> None:
        """Run until ``steps`` or a stop."""
        while self.step < steps:
            if self.step % EVERY == 0:
                self.judge()
                if self.history[-1][1] is GuardAction.stop:
                    return
            self.train_step()


def test_a_poisoned_stretch_is_passed_by_going_back_and_skipping_it() -> None:
    for seed in range(3):
        run = Run(SafetyGuard(), seed)
        run.train(400)
        taken = [step for step, action in run.history if action is GuardAction.rollback]
        assert len(taken) == 1
        assert 120 < taken[0] <= 190  # the poison starts at step 125
        assert run.skill["a"] > 0.6
        rolled_back = next(e for e in run.events if e.kind == "rolled_back")
        assert rolled_back.data["to"] >= taken[0] - 100
        assert [e.kind for e in run.events if e.kind in ("rolled_back", "recovered")] == [
            "rolled_back",
            "recovered",
        ]


def test_the_culprit_is_named_and_slowed_until_the_victim_has_recovered() -> None:
    run = Run(SafetyGuard())
    while not any(action is GuardAction.rollback for _, action in run.history):
        run.train(run.step + EVERY)
    assert run.guard.weight_factors() == {"a": 2.0, "b": 0.5}
    assert run.scheduler.weights()["a"] > 0.75
    assert run.guard.lr_factor(run.step) == 0.5


def test_without_a_change_the_failure_is_replayed_until_the_run_stops() -> None:
    same = {"skip_data": False, "lr_factor": 1.0, "culprit_factor": 1.0, "victim_factor": 1.0}
    run = Run(SafetyGuard(max_rollbacks=2, cooldown_steps=0, **same))
    run.train(400)
    actions = [action for _, action in run.history]
    assert actions.count(GuardAction.rollback) == 2
    assert actions[-1] is GuardAction.stop
    assert "again after 2 rollbacks" in run.events[-1].reason


def test_without_the_guard_the_run_goes_through_the_poison() -> None:
    """The control: most of the ability is lost, and at equal steps less of it is back."""
    unguarded, guarded = Run(SafetyGuard(warmup=1000)), Run(SafetyGuard())  # the first never acts
    unguarded.train(180)
    assert unguarded.skill["a"] < 0.3
    unguarded.train(400)
    guarded.train(400)
    assert unguarded.skill["a"] < guarded.skill["a"] - 0.1
