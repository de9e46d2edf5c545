"""A stand-in for the actor with the real controllers around it, in the order in which the trainer runs them.

What is simulated: the skill of each task rises with its informative groups and falls by what other tasks'
updates do to it (``harm``); violations drift up and fall with lambda; held-out prompts are solved less
often than trained ones (``gap``). Real: scheduler, guard, multipliers, difficulty pools.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from multitask_rl.config.task import CurriculumSpec
from multitask_rl.constraints.multiplier import LagrangeMultiplier
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.data import PooledStream, PromptStream
from multitask_rl.guard.decision import CheckpointInfo, GuardAction
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.records import NUM_EXTREMES, Direction, Event, TaskEvaluation, TaskStats
from multitask_rl.statistics.intervals import summarise
from multitask_rl.testing import make_evaluation

GROUP = 8
EVERY = 10
HELD_OUT = 256


@dataclass(kw_only=True)
class Skill:
    """One task of the stand-in."""

    level: float = 0.3
    """Share of held-out prompts solved."""
    top: float = 0.95
    speed: float = 0.002
    """Part of the way to ``top`` that one informative group brings."""
    gap: float = 0.0
    """How much more often trained prompts are solved than held-out ones."""
    spread: float = 0.0
    """Prompts of the easy and the hard half are solved so much more and less often."""
    limit: float | None = None
    """Allowed rate of violations; None = no constraint."""
    violations: float = 0.0
    """Rate of violations."""
    price: float = 0.0
    """What the reward loses as violations go from all to none."""
    by: str = ""
    """Column of the curriculum."""


@dataclass(kw_only=True)
class Loop:
    """A run of the stand-in."""

    skills: dict[str, Skill]
    scheduler: DynamicTaskWeightScheduler = field(default_factory=DynamicTaskWeightScheduler)
    guard: SafetyGuard = field(default_factory=SafetyGuard)
    harm: Mapping[str, tuple[str, range, float]] = field(default_factory=dict)
    """Victim -> (whose updates, at which of the steps ever made, part of the skill that one costs)."""
    prompts: int = 16
    seed: int = 0
    evaluates: bool = True

    def __post_init__(self) -> None:
        names = list(self.skills)
        self.scheduler.bind(names, reward_ranges=dict.fromkeys(names, (0.0, 1.0)), seed=self.seed)
        self.guard.bind(names)
        self.multipliers = {
            n: LagrangeMultiplier(s.limit) for n, s in self.skills.items() if s.limit is not None
        }
        self.streams = {n: _stream(n, s, self.seed) for n, s in self.skills.items()}
        self.random = random.Random(self.seed)
        self.step = self.passed = 0
        self.saved: dict[int, tuple[str, bool]] = {}
        self.actions: list[tuple[int, GuardAction]] = []
        self.events: list[Event] = []
        self.shares: list[dict[str, float]] = []

    def train(self, steps: int, *, until: GuardAction = GuardAction.stop) -> None:
        """Go on until ``steps``, or until the guard decides to stop or on ``until``."""
        while self.step < steps:
            if self.evaluates and self.step % EVERY == 0:
                action = self._judge()
                if action in (until, GuardAction.stop):
                    return
            self.train_step()

    def train_step(self) -> None:
        """Sample, learn, decide, as ``Trainer.train_step``."""
        self.shares.append(self.scheduler.weights())
        quotas = self.scheduler.quotas(self.prompts)
        stats = {name: self._learn(name, number) for name, number in quotas.items() if number}
        for victim, (culprit, when, part) in self.harm.items():
            if self.passed in when:
                is_trained = quotas.get(culprit, 0) > 0
                self.skills[victim].level *= 1.0 - part * is_trained * self.guard.lr_factor(self.step)
        self.events += self.scheduler.update(stats, self.step)
        self.guard.record_step(self.step, stats)
        self.step, self.passed = self.step + 1, self.passed + 1

    def _learn(self, name: str, number: int) -> TaskStats:
        skill, stream = self.skills[name], self.streams[name]
        draws = stream.next(number)
        groups, costs = {}, []
        for draw, row in draws:
            rate = self._rate(skill, row["half"]) + skill.gap
            groups[draw] = [float(self.random.random() < rate) for _ in range(GROUP)]
            costs += [float(self.random.random() < skill.violations) for _ in range(GROUP)]
        self.events += stream.observe(groups, self.step)
        informative = sum(0 < sum(own) < GROUP for own in groups.values())
        pressure = self.multipliers[name].value if name in self.multipliers else 0.0
        lr = self.guard.lr_factor(self.step)
        skill.level += lr * skill.speed * informative / (1.0 + pressure) * (skill.top - skill.level)
        metrics = {}
        if name in self.multipliers:
            odds = 0.02 * lr * number * (0.1 - pressure) / (1.0 + pressure)
            logit = math.log(skill.violations / (1.0 - skill.violations)) + odds
            skill.violations = min(0.99, 1.0 / (1.0 + math.exp(-logit)))
            metrics["cost/safe"] = sum(costs) / len(costs)
            self.events += self.multipliers[name].update(metrics["cost/safe"], self.step)
        rewards = [reward for own in groups.values() for reward in own]
        spreads = [math.sqrt(sum(own) / GROUP * (1 - sum(own) / GROUP)) for own in groups.values()]
        return TaskStats(
            task=name,
            num_prompts=number,
            num_informative=informative,
            reward_mean=sum(rewards) / len(rewards),
            reward_std=sum(spreads) / len(spreads),
            lowest=sorted(min(own) for own in groups.values())[:NUM_EXTREMES],
            highest=sorted((max(own) for own in groups.values()), reverse=True)[:NUM_EXTREMES],
            shift=stream.shift(),
            metrics=metrics,
        )

    @staticmethod
    def _rate(skill: Skill, half: int) -> float:
        paid = skill.price * (1.0 - skill.violations) if skill.limit is not None else 0.0
        return min(1.0, max(0.0, skill.level * (1.0 - paid) + (skill.spread if half else -skill.spread)))

    def rate(self, name: str) -> float:
        """Return the true level of a task: over all its prompts, held out."""
        return 0.5 * sum(self._rate(self.skills[name], half) for half in (0, 1))

    def evaluate(self) -> dict[str, TaskEvaluation]:
        """Return fresh held-out evaluations."""
        found = {}
        for name, skill in self.skills.items():
            solved = [float(self.random.random() < self._rate(skill, i % 2)) for i in range(HELD_OUT)]
            violated = [float(self.random.random() < skill.violations) for _ in range(HELD_OUT)]
            rate = summarise(violated, direction=Direction.lower, low=0.0, high=1.0, keep=range(HELD_OUT))
            metrics = {"violation_rate": rate} if skill.limit is not None else {}
            found[name] = make_evaluation(solved, task=name, step=self.step, metrics=metrics)
        return found

    def _judge(self) -> GuardAction:
        evaluations = self.evaluate()
        means = {name: evaluation.primary.mean for name, evaluation in evaluations.items()}
        errors = {name: evaluation.primary.error for name, evaluation in evaluations.items()}
        self.scheduler.calibrate(means, self.step, errors)
        decision = self.guard.observe(self.step, evaluations)
        self.actions.append((self.step, decision.action))
        self.events += decision.events
        if decision.action is GuardAction.rollback:
            infos = [CheckpointInfo(step=s, judged_good=good) for s, (_, good) in self.saved.items()]
            if (target := self.guard.rollback_target(infos)) is not None:
                cursors = {name: stream.state_dict() for name, stream in self.streams.items()}
                self._load_actor(json.loads(self.saved[target.step][0]))
                if decision.adjustments.skip_data:
                    for name, cursor in cursors.items():
                        self.streams[name].load_state_dict(cursor)
                self.saved = {s: kept for s, kept in self.saved.items() if s <= target.step}
                self.events += self.guard.rolled_back(target, step=self.step)
        else:
            self.saved[self.step] = json.dumps(self._actor_state()), decision.judged_good
        self.scheduler.set_factors(self.guard.weight_factors())
        return decision.action

    def _actor_state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "skills": {name: asdict(skill) for name, skill in self.skills.items()},
            "scheduler": self.scheduler.state_dict(),
            "multipliers": {name: m.state_dict() for name, m in self.multipliers.items()},
            "streams": {name: stream.state_dict() for name, stream in self.streams.items()},
        }

    def _load_actor(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.skills = {name: Skill(**skill) for name, skill in state["skills"].items()}
        self.scheduler.load_state_dict(state["scheduler"])
        for name, multiplier in self.multipliers.items():
            multiplier.load_state_dict(state["multipliers"][name])
        for name, stream in self.streams.items():
            stream.load_state_dict(state["streams"][name])

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, JSON-able."""
        version, numbers, gauss = self.random.getstate()
        return {
            **self._actor_state(),
            "guard": self.guard.state_dict(),
            "random": [version, list(numbers), gauss],
            "passed": self.passed,
            "saved": [[step, *kept] for step, kept in self.saved.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._load_actor(state)
        self.guard.load_state_dict(state["guard"])
        version, numbers, gauss = state["random"]
        self.random.setstate((version, tuple(numbers), gauss))
        self.passed = state["passed"]
        self.saved = {step: (kept, good) for step, kept, good in state["saved"]}


def _stream(name: str, skill: Skill, seed: int) -> PromptStream:
    rows = [{"id": i, "half": i % 2} for i in range(200)]
    if skill.by:
        return PooledStream(rows, task=name, seed=seed, spec=CurriculumSpec(by=skill.by))
    return PromptStream(rows, task=name, seed=seed)
