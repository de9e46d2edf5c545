"""Shares and quotas over sequences of steps and evaluations, against the reference's scheduler."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from multitask_rl.curriculum import bandit
from multitask_rl.curriculum.patience import Patience
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.curriculum.signal import TaskTrace
from multitask_rl.curriculum.tac import TAC
from multitask_rl.records import Direction
from multitask_rl.seeding import derive_seed
from multitask_rl.statistics.intervals import summarise

from .cases import draw_policy
from .naive.controllers import Scheduler
from .naive.settings import POLICIES, RewardRule, Settings, Task
from .product import seen_of, stats_of
from .world import Past, past_cosine, past_rewards

NUM_SEQUENCES, NUM_STEPS = 10, 150


def tasks_of(stream: random.Random) -> list[Task]:
    found = []
    for name in "abcd"[: stream.choice((1, 2, 3, 4))]:
        ends = stream.choice(({}, {"low": 0.0, "high": 1.0}, {"low": -2.0, "high": 4.0}))
        task = Task(name=name, rewards=[RewardRule(name="reward0", **ends)], target=stream.choice((1.0, 0.7)))
        task.weight = stream.choice((1.0, 2.0, 5.0, 0.0 if found else 1.0))
        task.min_share = stream.choice((None, None, None, 0.0, 0.2))
        task.group_size = stream.choice((1, 3, 3))
        found.append(task)
    return found


def differences(seed: int, policy: str) -> list[str]:
    """Play one sequence on both sides; return where they differ."""
    stream = random.Random(f"scheduler {policy} {seed}")
    tasks = tasks_of(stream)
    settings = Settings(
        tasks=tasks,
        prompts_per_step=stream.choice((3, 8, 40)),
        policy=policy,
        policy_config=draw_policy(stream, policy),
        min_weight=stream.choice((None, None, 0.0, 0.05)),
    )
    # a metric in place of the reward: its direction and declared range by task
    own = random.Random(f"watched {policy} {seed}")
    watched = {t.name: (own.random() < 0.5, own.choice((None, (0.0, 1.0), (-3.0, 5.0)))) for t in tasks}
    watched = watched if own.random() < 0.4 else {}
    reference = Scheduler(settings, {t.name: derive_seed(seed, "quota", t.name) for t in tasks})

    def bound() -> DynamicTaskWeightScheduler:
        found = DynamicTaskWeightScheduler(
            {t.name: t.weight for t in tasks},
            policy=policy,
            min_weight=settings.min_weight,
            metric_key="watched" if watched else "reward_score",
            **settings.policy_config,
        )
        ranges = {t.name: ends for t in tasks if (ends := t.range_of("reward")) is not None}
        found.bind(
            [t.name for t in tasks],
            targets={t.name: t.target for t in tasks},
            min_shares={t.name: t.min_share for t in tasks},
            reward_ranges=ranges,
            seed=seed,
        )
        return found

    product, past = bound(), dict[str, Past]()
    for step in range(NUM_STEPS):
        quotas, wanted = product.quotas(settings.prompts_per_step), reference.quotas()
        if quotas != wanted:
            return [f"step {step}: quotas {quotas}, reference {wanted}"]
        groups = {}
        for t in tasks:
            if t.name not in past or stream.random() < 0.03:
                kind = stream.choice(("alive", "form", "solved", "rare", "dead"))
                past[t.name] = Past(0, stream.choice((0.0, 0.3, 0.6, 0.95)), kind)
            ends = t.range_of("reward") or (-1.0, 3.0)
            found = past_rewards(seed, t.name, past[t.name], step, ends, quotas[t.name])
            groups[t.name] = [own[: t.group_size] for own in found if stream.random() < 0.95]
        cosines: dict[str, dict[str, float]] = {t.name: {} for t in tasks}
        if stream.random() < 0.5:
            for a in cosines:
                cosines[a] = {b: past_cosine(seed, a, b, step) for b in cosines if b != a}
        told = {n: stats_of(n, own, cosines[n]) for n, own in groups.items()}
        seen = {n: seen_of(own, cosines[n]) for n, own in groups.items()}
        for t in (t for t in tasks if watched):
            is_lower, ends = watched[t.name]
            low, high = ends or (-math.inf, math.inf)
            value = own.choice((math.nan, 0.2, 0.6, 0.8)) if step < 70 else own.uniform(-3.0, 5.0)
            has_value = groups[t.name] and not math.isnan(value)
            value = min(high, max(low, value)) if has_value else math.nan
            seen[t.name] = replace(seen[t.name], watched=(value, ends, is_lower))
            direction = Direction.lower if is_lower else Direction.higher
            number = summarise([value], direction=direction, low=low, high=high)
            extra = {} if math.isnan(value) else {"watched": value}
            told[t.name] = replace(
                told[t.name],
                metrics={**told[t.name].metrics, **extra},
                statistics=dict.fromkeys(extra, number),
                reward_range=t.range_of("reward") if groups[t.name] else None,
            )
        product.update(told, step)
        reference.observe(seen)
        short = {t.name: n for t in tasks if groups[t.name] and (n := stream.choice((0, 0, 1, 3)))}
        product.carry_over(short, settings.prompts_per_step)
        reference.carry_over(short)
        if step % 20 == 19:
            held_out = {t.name: (stream.gauss(0.4, 0.3), stream.choice((0.0, 0.03))) for t in tasks}
            means, errors = ({n: own[i] for n, own in held_out.items()} for i in (0, 1))
            product.calibrate(means, step, errors)
            for name, trace in reference.traces.items() if not watched else ():
                trace.calibrate(*held_out[name])
        if stream.random() < 0.03:
            factors = {t.name: stream.choice((0.0, 0.5, 2.0)) for t in tasks if stream.random() < 0.5}
            product.set_factors(factors)
            reference.factors = factors
        if stream.random() < 0.03:
            state, product = product.state_dict(), bound()
            product.load_state_dict(state)
        found_shares, shares = product.weights(), reference.shares()
        if any(abs(found_shares[n] - share) > 1e-9 for n, share in shares.items()):
            return [f"step {step}: shares {found_shares}, reference {shares}"]
    return []


@pytest.mark.parametrize("policy", POLICIES)
def test_shares_and_quotas_are_those_of_the_reference(policy: str) -> None:
    for seed in range(NUM_SEQUENCES):
        assert differences(seed, policy) == [], f"seed {seed}"


def a_plateau_changes_nothing(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(Patience, "_learn", lambda self, progress: None)
    return "patience"


def gains_are_of_any_size(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(bandit, "NOISE", 0.0)
    return "bandit"


def the_spread_has_no_error(patch: pytest.MonkeyPatch) -> str:
    real = TaskTrace.spread
    patch.setattr(TaskTrace, "spread", property(lambda self: (real.fget(self)[0], 0.0)))
    return "learnability"


def transfer_has_no_error(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(TAC, "transfer_error", lambda self, task: 0.0)
    return "tac"


PLANTS = (
    a_plateau_changes_nothing,
    gains_are_of_any_size,
    the_spread_has_no_error,
    transfer_has_no_error,
)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_of_a_policy_is_seen(plant, monkeypatch) -> None:
    policy = plant(monkeypatch)
    seen = Counter(bool(differences(seed, policy)) for seed in range(NUM_SEQUENCES))
    assert seen[True] > 0
