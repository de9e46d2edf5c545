"""Gate, refill and carry-over: no task is owed groups that it cannot give, or pays for another alone."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping

from multitask_rl.algorithms.grpo import GRPO
from multitask_rl.algorithms.kl import KLController
from multitask_rl.config.task import KLSpec, TaskSpec
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.records import Event, SamplingParams, Scored
from multitask_rl.step.metrics import by_group, is_informative, task_stats
from multitask_rl.step.refill import Refill
from multitask_rl.step.task_state import TaskState
from multitask_rl.testing import make_rollout
from multitask_rl.training.backend import LearnerTask

PROMPTS = 8
GROUP = 4


def _run(name: str) -> TaskState:
    spec, algorithm = TaskSpec(name=name), GRPO(GRPO.Config())
    return TaskState(
        spec=spec,
        algorithm=algorithm,
        sampling=SamplingParams(),
        group_size=GROUP,
        kl=KLController(KLSpec()),
        learner=LearnerTask(spec=spec, algorithm=algorithm),
    )


class _Loop:
    """Tasks whose groups have different rewards with fixed rates; scheduler, gate and refill are real."""

    def __init__(self, rates: Mapping[str, float], policy: str, rounds: int) -> None:
        self.rates = dict(rates)
        self.runs = {name: _run(name) for name in rates}
        self.scheduler = DynamicTaskWeightScheduler(policy=policy)
        self.scheduler.bind(list(rates), reward_ranges=dict.fromkeys(rates, (0.0, 1.0)))
        self.refill = Refill(self.runs, rounds, self.scheduler.informative_rate)
        self.events: list[Event] = []
        self.asked, self.drawn, self.trained = Counter[str](), Counter[str](), Counter[str]()
        self._random, self._numbers = random.Random(0), itertools.count()

    def _experience(self, counts: Mapping[str, int]) -> list[Scored]:
        scored = []
        for task, count in counts.items():
            for number in itertools.islice(self._numbers, count):
                differs = self._random.random() < self.rates[task]
                rewards = [float(differs and i == 0) for i in range(GROUP)]
                scored += [
                    Scored(rollout=make_rollout(task=task, draw=number, sample=i), reward=reward)
                    for i, reward in enumerate(rewards)
                ]
        return scored

    def train(self, start: int, steps: int) -> None:
        """Count what is asked for, drawn and trained on in these steps."""
        self.asked, self.drawn, self.trained = Counter(), Counter(), Counter()
        for step in range(start, start + steps):
            quotas = self.scheduler.quotas(PROMPTS)
            drawn, kept = self.refill.collect(quotas, self._experience)
            self.scheduler.carry_over(self.refill.shortfall(kept, quotas), PROMPTS)
            self.asked.update(quotas)
            groups = by_group(drawn)
            stats = {name: task_stats(self.runs[name], own, {}) for name, own in groups.items()}
            self.drawn.update({name: len(own) for name, own in groups.items()})
            for name, own in by_group(kept).items():
                self.trained[name] += sum(is_informative(self.runs[name], g) for g in own.values())
            self.events += self.scheduler.update(stats, step)


def test_a_hopeless_task_is_held_not_refilled_and_comes_back() -> None:
    loop = _Loop({"easy": 0.9, "fair": 0.5, "hopeless": 0.0}, "deficit_learnability", rounds=2)
    loop.train(0, 260)
    assert [e.task for e in loop.events if e.kind == "alarm"] == ["hopeless"]
    loop.train(260, 100)
    assert loop.asked["hopeless"] == loop.drawn["hopeless"], "nothing is drawn again for it"
    assert loop.drawn["hopeless"] / loop.drawn.total() < 0.08
    loop.rates["hopeless"] = 0.4
    loop.train(360, 150)
    assert [e.task for e in loop.events if e.kind == "release"] == ["hopeless"]
    assert loop.scheduler.weights()["hopeless"] > 0.2


def test_a_task_that_rarely_teaches_is_owed_what_the_others_can_spare() -> None:
    loop = _Loop({"easy": 0.9, "rare": 0.08}, "uniform", rounds=1)
    loop.train(0, 150)
    assert not [e for e in loop.events if e.kind == "alarm"]
    assert loop.asked["rare"] > loop.asked["easy"]
    assert loop.asked["easy"] / loop.asked.total() > 0.2
    assert loop.trained["easy"] / loop.asked["easy"] > 0.9
    assert loop.drawn["rare"] / loop.asked["rare"] < 4.0


def test_a_frozen_task_is_owed_nothing_when_it_comes_back() -> None:
    loop = _Loop({"easy": 0.9, "rare": 0.2}, "uniform", rounds=1)
    loop.train(0, 50)
    loop.scheduler.set_factors({"rare": 0.0})
    loop.train(50, 100)
    assert loop.asked["rare"] == 0
    loop.scheduler.set_factors({})
    assert loop.scheduler.quotas(PROMPTS) == {"easy": PROMPTS // 2, "rare": PROMPTS // 2}
