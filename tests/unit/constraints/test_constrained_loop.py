"""A multiplier, a refill and the credit together, on a simulated policy: the limit is held."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence

import pytest

from multitask_rl.algorithms.base import Algorithm
from multitask_rl.algorithms.dapo import DAPO
from multitask_rl.algorithms.grpo import GRPO
from multitask_rl.algorithms.kl import KLController
from multitask_rl.algorithms.reinforce_pp import ReinforcePP
from multitask_rl.config.task import ConstraintSpec, KLSpec, TaskSpec
from multitask_rl.constraints.multiplier import LagrangeMultiplier
from multitask_rl.curriculum.signal import TaskTrace
from multitask_rl.records import SamplingParams, Scored, Verdict
from multitask_rl.step.metrics import by_group, task_stats
from multitask_rl.step.refill import Refill
from multitask_rl.step.stages import AdvantageStage
from multitask_rl.step.task_state import TaskState
from multitask_rl.testing import make_rollout
from multitask_rl.training.backend import CreditedSample, LearnerTask
from multitask_rl.training.credit import CreditAssigner

LIMIT = 0.1
GROUP_SIZE = 4
PROMPTS = 8


def build_run(algorithm: Algorithm) -> TaskState:
    constraint = ConstraintSpec(plugin="safe", mode="lagrangian", limit=LIMIT)
    spec = TaskSpec(name="task", constraints=[constraint])
    return TaskState(
        spec=spec,
        algorithm=algorithm,
        sampling=SamplingParams(),
        group_size=GROUP_SIZE,
        kl=KLController(KLSpec()),
        learner=LearnerTask(spec=spec, algorithm=algorithm),
        multipliers={"safe": LagrangeMultiplier(LIMIT, constraint.multiplier)},
    )


class Policy:
    """One logit, of violating. Prompts with even numbers are always solved, and only there it violates.

    The others are solved by chance for ever: their rewards differ in almost every group.
    """

    def __init__(self, seed: int) -> None:
        self.logit = 0.0
        self._stream = random.Random(seed)
        self._draws = itertools.count()

    @property
    def rate(self) -> float:
        """Of violations, over all prompts."""
        return sigmoid(self.logit) / 2

    def respond(self, counts: Mapping[str, int]) -> list[Scored]:
        """Return a group per prompt."""
        draws = itertools.islice(self._draws, counts["task"])
        return [self._one(draw, i) for draw in draws for i in range(GROUP_SIZE)]

    def learn(self, credited: Sequence[CreditedSample], rate: float) -> None:
        """Follow the policy gradient of the mean over the samples."""
        easy = [c for c in credited if c.sample.scored.rollout.prompt.draw % 2 == 0]
        scores = [c.sample.scored.cost - sigmoid(self.logit) for c in easy]
        moves = [float(c.advantages[0]) * score for c, score in zip(easy, scores, strict=True)]
        self.logit += rate * math.fsum(moves) / len(credited)

    def _one(self, draw: int, sample: int) -> Scored:
        is_easy = draw % 2 == 0
        violates = is_easy and self._stream.random() < sigmoid(self.logit)
        solves = is_easy or self._stream.random() < 0.5
        rollout = make_rollout("ny"[violates], draw=draw, sample=sample)
        rollout.verdicts = {"safe": Verdict(cost=float(violates), violated=violates)}
        return Scored(rollout=rollout, reward=float(solves), cost=float(violates))


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def train(algorithm: Algorithm, rounds: int, *, num_steps: int = 120) -> tuple[list[float], list[float]]:
    """Return the rate of violations and lambda after each step."""
    run, trace, policy = build_run(algorithm), TaskTrace(), Policy(seed=0)
    credit = CreditAssigner(None, {"task": run.learner}, many_updates=False)
    advantages = AdvantageStage(credit, {"task": run})
    refill = Refill({"task": run}, rounds, lambda _: trace.informative)
    rates, multipliers = [], []
    for step in range(num_steps):
        drawn, kept = refill.collect({"task": PROMPTS}, policy.respond)
        policy.learn(advantages.process(kept), rate=1.5)
        stats = task_stats(run, by_group(drawn)["task"], advantages.metrics["task"])
        trace.observe(stats, metric_key="reward_score", smoothing=0.05)
        run.control(stats, step)
        rates.append(policy.rate)
        multipliers.append(run.multipliers["safe"].value)
    return rates, multipliers


@pytest.mark.parametrize(
    ("algorithm", "rounds"), [(GRPO, 0), (GRPO, 1), (GRPO, 3), (DAPO, 3), (ReinforcePP, 3)]
)
def test_the_limit_is_held_however_many_rounds_of_refill(algorithm: type[Algorithm], rounds: int) -> None:
    rates, multipliers = train(algorithm(algorithm.Config()), rounds)
    assert max(rates[-40:]) <= LIMIT
    assert max(multipliers[-40:]) < 1.0, "lambda has no reason to wind up"
