"""Refill: a task trains on its share, at a bounded price, and nothing is spent where nothing can be found."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from multitask_rl.algorithms.grpo import GRPO
from multitask_rl.algorithms.kl import KLController
from multitask_rl.config.task import KLSpec, MultiplierSpec, TaskSpec
from multitask_rl.constraints.multiplier import LagrangeMultiplier
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.records import SamplingParams, Scored, Verdict
from multitask_rl.step.metrics import StepReport, by_group, has_spread, is_informative, task_stats
from multitask_rl.step.refill import MAX_OVERSAMPLING, Refill
from multitask_rl.step.stages import AdvantageStage
from multitask_rl.step.task_state import TaskState
from multitask_rl.testing import make_rollout
from multitask_rl.training.backend import LearnerTask
from multitask_rl.training.credit import CreditAssigner

Experience = Callable[[Mapping[str, int]], list[Scored]]


def _run(
    name: str, *, limits: tuple[str, ...] = (), price: float = 1.0, kl: float = 0.0, entropy: float = 0.0
) -> TaskState:
    spec, algorithm = TaskSpec(name=name), GRPO(GRPO.Config(entropy_coefficient=entropy))
    return TaskState(
        spec=spec,
        algorithm=algorithm,
        sampling=SamplingParams(),
        group_size=2,
        kl=KLController(KLSpec(coefficient=kl)),
        learner=LearnerTask(spec=spec, algorithm=algorithm, kl_coefficient=kl),
        multipliers={
            constraint: LagrangeMultiplier(0.1, MultiplierSpec(initial_value=price)) for constraint in limits
        },
    )


def _group(draw: int, rewards: Sequence[float], **costs: Sequence[float | None]) -> list[Scored]:
    """A group with its costs by constraint; None: the constraint does not concern the response."""
    scored = []
    for i, reward in enumerate(rewards):
        rollout = make_rollout(draw=draw, sample=i)
        for name, values in costs.items():
            cost = values[i]
            rollout.verdicts[name] = Verdict(
                cost=cost or 0.0, violated=bool(cost), applicable=cost is not None
            )
        scored.append(Scored(rollout=rollout, reward=reward))
    return scored


def _experience(rates: Mapping[str, float], drawn: dict[str, int], seed: int = 0) -> Experience:
    """Groups of two; the two rewards differ with probability ``rates[task]``."""
    stream, numbers = random.Random(seed), itertools.count()

    def draw(counts: Mapping[str, int]) -> list[Scored]:
        scored = []
        for task, count in counts.items():
            drawn[task] = drawn.get(task, 0) + count
            for _ in range(count):
                rewards = (0.0, 1.0) if stream.random() < rates[task] else (1.0, 1.0)
                number = next(numbers)
                scored += [
                    Scored(rollout=make_rollout(task=task, draw=number, sample=i), reward=reward)
                    for i, reward in enumerate(rewards)
                ]
        return scored

    return draw


@pytest.mark.parametrize("rate", [0.15, 0.3, 0.7])
@pytest.mark.parametrize("prompts", [4, 16])
def test_a_task_with_few_informative_groups_gets_its_share_of_the_training(rate: float, prompts: int) -> None:
    rates = {"easy": 1.0, "hard": rate}
    runs, drawn = {name: _run(name) for name in rates}, dict[str, int]()
    scheduler = DynamicTaskWeightScheduler(policy="uniform")
    scheduler.bind(list(rates))
    refill = Refill(runs, 1, lambda task: rates[task])
    experience = _experience(rates, drawn)
    trained = dict.fromkeys(rates, 0)
    for _step in range(200):
        quotas = scheduler.quotas(prompts)
        assert sum(quotas.values()) == prompts
        _, kept = refill.collect(quotas, experience)
        scheduler.carry_over(refill.shortfall(kept, quotas), prompts)
        for name, groups in by_group(kept).items():
            trained[name] += sum(is_informative(runs[name], g) for g in groups.values())
    assert trained["hard"] / sum(trained.values()) == pytest.approx(0.5, abs=0.05)
    assert drawn["hard"] <= 2 * (1 + MAX_OVERSAMPLING) * 100 * prompts


def test_what_a_task_is_owed_is_bounded() -> None:
    scheduler = DynamicTaskWeightScheduler(policy="uniform")
    scheduler.bind(["dry", "rich"])
    for _step in range(50):
        scheduler.quotas(8)
        scheduler.carry_over({"dry": 4}, 8)
    assert scheduler.quotas(8)["dry"] <= 8
    counts = [scheduler.quotas(8)["dry"] for step in range(51, 61)]
    assert counts[2:] == [4] * 8, "a debt of one step's worth is paid back within two"


def test_a_task_known_to_give_nothing_costs_no_extra_prompts() -> None:
    drawn: dict[str, int] = {}
    refill = Refill({"solved": _run("solved")}, 3, lambda task: 0.01)
    refill.collect({"solved": 2}, _experience({"solved": 0.0}, drawn))
    assert drawn == {"solved": 2}


def test_an_unlucky_step_of_a_learnable_task_is_made_up_for() -> None:
    drawn: dict[str, int] = {}
    refill = Refill({"task": _run("task")}, 1, lambda task: 0.5)
    refill.collect({"task": 2}, _experience({"task": 0.0}, drawn))
    assert drawn["task"] > 2


def test_a_rate_that_is_off_by_a_rounding_costs_no_prompt() -> None:
    for rate in (0.625, 0.6249999999999999):  # of the smoothed share of groups, as a sum in another order
        drawn: dict[str, int] = {}
        refill = Refill({"task": _run("task")}, 1, lambda _, rate=rate: rate)
        refill.collect({"task": 1}, _experience({"task": 0.0}, drawn))
        assert drawn == {"task": 1 + 2}  # (0 + 4 * 0.625) / (1 + 4) = 1 / 2


def test_late_groups_of_a_task_without_a_quota_in_the_step_are_trained_on() -> None:
    drawn = _experience({"fast": 1.0, "slow": 1.0}, {})({"fast": 3, "slow": 1})
    report = StepReport(step=0, quotas={"fast": 3, "slow": 0, "idle": 1}, drawn=drawn, kept=drawn)
    assert report.shares({"fast", "slow"}) == {"fast": 0.75, "slow": 0.25}
    assert report.shares({"fast", "idle"}) == {"fast": 0.75, "idle": 0.25}
    assert report.shares(set()) == {}


def test_without_rounds_nothing_is_drawn_again() -> None:
    drawn: dict[str, int] = {}
    refill = Refill({"task": _run("task")}, 0, lambda task: 0.5)
    refill.collect({"task": 4}, _experience({"task": 0.2}, drawn))
    assert drawn == {"task": 4}


def test_a_group_is_informative_by_its_costs_too() -> None:
    run = _run("task", limits=("safe", "short"))
    assert is_informative(run, _group(0, [0.0, 1.0], safe=[0.0, 0.0]))
    assert is_informative(run, _group(0, [1.0, 1.0], safe=[0.0, 0.0], short=[0.0, 1.0]))
    assert not is_informative(run, _group(0, [1.0, 1.0], safe=[1.0, 1.0], short=[0.0, 0.0]))
    assert not is_informative(run, _group(0, [1.0, 1.0], safe=[1.0, None])), "one concerned alone"
    assert not is_informative(run, _group(0, [1.0, 1.0], measured=[0.0, 1.0])), "no multiplier, no gradient"
    failed = _group(0, [1.0, 1.0], safe=[0.0, 1.0])
    failed[1].reward = None
    assert not is_informative(run, failed), "it is not trained on"


@pytest.mark.parametrize("price", [0.0, 0.5])
def test_costs_make_a_group_informative_if_they_give_it_a_gradient(price: float) -> None:
    run, group = _run("task", limits=("safe",), price=price), _group(0, [1.0, 1.0], safe=[0.0, 1.0])
    run.sync_learner()
    credit = CreditAssigner(None, {"task": run.learner}, many_updates=False)
    credited = AdvantageStage(credit, {"task": run}).process(group)
    has_gradient = any(bool(c.advantages.any()) for c in credited)
    assert is_informative(run, group) == has_spread(run, group) == has_gradient == (price > 0)


def test_a_solved_task_whose_costs_differ_is_learnable() -> None:
    run = _run("task", limits=("safe",))
    groups = {str(i): _group(i, [1.0, 1.0], safe=[0.0, float(i < 3)]) for i in range(4)}
    assert [has_spread(run, group) for group in groups.values()] == [True, True, True, False]
    assert task_stats(run, groups, {}).num_informative == 3


@pytest.mark.parametrize("term", [{"kl": 0.01}, {"entropy": 0.01}])
def test_solved_groups_are_not_passed_over_where_a_term_gives_them_a_gradient(term: dict[str, float]) -> None:
    rewards = [(1.0, 1.0), (0.0, 1.0), (1.0, 1.0), (0.0, 1.0), (1.0, 1.0), (0.0, 1.0)]
    drawn = [s for draw, own in enumerate(rewards) for s in _group(draw, own)]

    def kept(run: TaskState, quota: int) -> list[int]:
        own = Refill({"task": run}, 1, lambda _: 0.5).keep(drawn, {"task": quota})
        return [s.rollout.prompt.draw for s in own][::2]

    assert kept(_run("task"), 2) == [1, 3]
    assert kept(_run("task"), 4) == [1, 3, 5, 0]
    assert kept(_run("task", **term), 2) == [0, 1, 2, 3]
    assert kept(_run("task", **term), 4) == [0, 1, 2, 3, 4, 5]
    assert kept(_run("task", **term), 0) == []
