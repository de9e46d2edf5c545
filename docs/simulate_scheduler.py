"""Recompute the tables of "Policies in simulation": ``python docs/simulate_scheduler.py``."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from statistics import mean
from typing import Any

from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.records import TaskStats

POLICIES = ("uniform", "deficit_learnability", "mt_grpo", "straggler", "learnability", "bandit", "patience")
STARTS = {"arithmetic": 0.35, "sort": 0.1, "code": 0.4, "safe": 0.5}
TAUS = {"arithmetic": 1100.0, "sort": 5500.0, "code": 1000.0, "safe": 600.0}
"""Informative groups after which the way to 1 is shorter by a factor of e."""
GROUP, PROMPTS, SEEDS = 8, 16, 5
SHORT = {"sum": (0.1, 12.0), "product": (0.3, 14.0), "largest": (0.1, 80.0), "kind": (0.12, 80.0)}
"""Level at the start, and number of groups as in ``TAUS``; two tasks are soon solved."""
SHORT_STEPS, SHORT_PROMPTS, SHORT_HELD_OUT, SHORT_SEEDS = 40, 12, 64, 40
PRIORS = (20, 100, 5)
"""``prior_prompts``; the default first."""
FORM = 0.1
"""Reward for the form of a response, of a task that is never solved."""
TRANSFER = {
    "none": {},
    "one helps": {("arithmetic", "sort"): 0.4, ("arithmetic", "code"): 0.4, ("arithmetic", "safe"): 0.4},
    "one harms": {("safe", "arithmetic"): -0.25, ("safe", "sort"): -0.25, ("safe", "code"): -0.25},
    "hardest harms": {("sort", "arithmetic"): -0.25, ("sort", "code"): -0.25, ("sort", "safe"): -0.25},
}
"""Name -> pair of tasks -> practice of either that an informative group of the other adds."""
TRANSFER_POLICIES = ("uniform", "deficit_learnability", "learnability", "tac")
TRANSFER_SEEDS, SEEN, NOISE = 10, 0.4, 0.15
"""A measured cosine is ``SEEN`` times the transfer, with noise of this standard deviation."""


def sample(task: str, level: float, num_prompts: int, stream: random.Random) -> TaskStats:
    """Return a step of ``num_prompts`` groups on prompts of mixed difficulty, solved with mean ``level``."""
    shape = 2.5 * max(level, 1e-3), 2.5 * max(1.0 - level, 1e-3)
    rates = [stream.betavariate(*shape) for _ in range(num_prompts)]
    solved = [sum(stream.random() < p for _ in range(GROUP)) / GROUP for p in rates]
    return TaskStats(
        task=task,
        num_prompts=num_prompts,
        num_informative=sum(0.0 < s < 1.0 for s in solved),
        reward_mean=mean(solved),
        reward_std=mean(math.sqrt(s * (1.0 - s)) for s in solved),
        headroom=mean(1.0 - (s * GROUP - 1.0) / (GROUP - 1.0) if s else 0.0 for s in solved),
    )


def sample_form(num_prompts: int, stream: random.Random) -> TaskStats:
    """Return a step of groups of which no response is right: half of them get ``FORM`` for their form."""
    shown = [sum(stream.random() < 0.5 for _ in range(GROUP)) / GROUP for _ in range(num_prompts)]
    return TaskStats(
        task="form",
        num_prompts=num_prompts,
        num_informative=sum(0.0 < s < 1.0 for s in shown),
        reward_mean=FORM * mean(shown),
        reward_std=FORM * mean(math.sqrt(s * (1.0 - s)) for s in shown),
        headroom=FORM * mean(1.0 - (s * GROUP - 1.0) / (GROUP - 1.0) if s else 0.0 for s in shown),
    )


def bound(policy: str, weights: Mapping[str, float]) -> DynamicTaskWeightScheduler:
    """Return a scheduler of tasks with rewards in [0, 1]."""
    scheduler = DynamicTaskWeightScheduler(weights, policy=policy)
    scheduler.bind(list(weights), reward_ranges=dict.fromkeys(weights, (0.0, 1.0)))
    return scheduler


def learn(
    policy: str, seed: int, steps: int = 1500, *, with_form: bool = False
) -> tuple[float, float, float, float]:
    """Return the worst task's level at the end, its mean over the steps, and the tasks' mean at the end.

    ``with_form`` adds a task that is never solved and whose responses differ in form; the last number is the
    mean of its share.
    """
    tasks = [*STARTS, "form"] if with_form else list(STARTS)
    scheduler, stream = bound(policy, dict.fromkeys(tasks, 1.0)), random.Random(seed)
    practice, worst, levels = dict.fromkeys(STARTS, 0), [], dict(STARTS)
    wasted = 0
    for step in range(steps):
        if step % 25 == 0:
            held_out = {t: mean(stream.random() < p for _ in range(256)) for t, p in levels.items()}
            errors = {t: math.sqrt(level * (1.0 - level) / 256) for t, level in held_out.items()}
            scheduler.calibrate(held_out, step, errors)
        quotas = scheduler.quotas(PROMPTS)
        num_form = quotas.pop("form", 0)
        wasted += num_form
        stats = {t: sample(t, levels[t], n, stream) for t, n in quotas.items() if n}
        form = {"form": sample_form(num_form, stream)} if num_form else {}
        scheduler.update(stats | form, step)
        for task, own in stats.items():
            practice[task] += own.num_informative
            levels[task] = 1.0 - (1.0 - STARTS[task]) * math.exp(-practice[task] / TAUS[task])
        worst.append(min(levels.values()))
    return worst[-1], mean(worst), mean(levels.values()), wasted / (steps * PROMPTS)


def learn_with_transfer(policy: str, planted: str, seed: int, steps: int = 1000) -> tuple[float, float]:
    """Return the worst task's level and the tasks' mean at the end; updates also change other tasks."""
    pairs = TRANSFER[planted] | {(b, a): c for (a, b), c in TRANSFER[planted].items()}
    scheduler, stream = bound(policy, dict.fromkeys(STARTS, 1.0)), random.Random(seed)
    practice, levels = dict.fromkeys(STARTS, 0.0), dict(STARTS)
    for step in range(steps):
        quotas = scheduler.quotas(PROMPTS)
        stats = {t: sample(t, levels[t], n, stream) for t, n in quotas.items() if n}
        if scheduler.compares_gradients(step):
            for task, other in itertools.combinations(stats, 2):
                cosine = SEEN * pairs.get((task, other), 0.0) + stream.gauss(0.0, NOISE)
                stats[task] = with_metric(stats[task], f"cosine/{other}", cosine)
                stats[other] = with_metric(stats[other], f"cosine/{task}", cosine)
        scheduler.update(stats, step)
        for task, own in stats.items():
            for other in practice:
                practice[other] += own.num_informative * (task == other or pairs.get((task, other), 0.0))
        practice = {task: max(0.0, number) for task, number in practice.items()}
        levels = {t: 1.0 - (1.0 - STARTS[t]) * math.exp(-practice[t] / TAUS[t]) for t in STARTS}
    return min(levels.values()), mean(levels.values())


def learn_briefly(policy: str, seed: int, **config: Any) -> tuple[float, float, float]:
    """Return the worst task's level and the tasks' mean at the end of a short run, and the largest share."""
    scheduler = DynamicTaskWeightScheduler(dict.fromkeys(SHORT, 1.0), policy=policy, **config)
    scheduler.bind(list(SHORT), reward_ranges=dict.fromkeys(SHORT, (0.0, 1.0)))
    stream, practice, largest = random.Random(seed), dict.fromkeys(SHORT, 0), 0.0
    levels = {task: start for task, (start, _) in SHORT.items()}
    for step in range(SHORT_STEPS):
        if step % 10 == 0:
            held_out = {
                t: mean(stream.random() < p for _ in range(SHORT_HELD_OUT)) for t, p in levels.items()
            }
            # as the intervals of evaluations: not 0 where all are right
            errors = {t: math.sqrt(max(p * (1.0 - p), 0.02) / SHORT_HELD_OUT) for t, p in held_out.items()}
            scheduler.calibrate(held_out, step, errors)
        quotas = scheduler.quotas(SHORT_PROMPTS)
        stats = {t: sample(t, levels[t], n, stream) for t, n in quotas.items() if n}
        scheduler.update(stats, step)
        for task, own in stats.items():
            practice[task] += own.num_informative
            start, tau = SHORT[task]
            levels[task] = 1.0 - (1.0 - start) * math.exp(-practice[task] / tau)
        largest = max(largest, *scheduler.weights().values())
    return min(levels.values()), mean(levels.values()), largest


def with_metric(stats: TaskStats, name: str, value: float) -> TaskStats:
    """Return ``stats`` with one more metric."""
    return replace(stats, metrics={**stats.metrics, name: value})


def off(policy: str, seed: int, steps: int = 600) -> list[float]:
    """Return how far the shares lie from the weights 1:2:1 while three tasks stand at one level."""
    weights = {"a": 0.25, "b": 0.5, "c": 0.25}
    scheduler, stream, found = bound(policy, weights), random.Random(seed), []
    for step in range(steps):
        quotas = scheduler.quotas(PROMPTS)
        scheduler.update({t: sample(t, 0.4, n, stream) for t, n in quotas.items() if n}, step)
        found.append(max(abs(share - weights[t]) for t, share in scheduler.weights().items()))
    return found


def main() -> None:
    """Print the table."""
    sys.stdout.write(
        "| policy | worst task | its mean over the run | mean | off the weights at equal levels |\n"
    )
    sys.stdout.write("|---|---|---|---|---|\n")
    for policy in POLICIES:
        runs = [learn(policy, seed) for seed in range(SEEDS)]
        figures = [mean(run[i] for run in runs) for i in range(3)]
        distance = mean(d for seed in range(SEEDS) for d in off(policy, seed))
        shown = f"{distance:.3f}" if policy != "uniform" else "-"
        cells = " | ".join(f"{figure:.3f}" for figure in figures)
        sys.stdout.write(f"| `{policy}` | {cells} | {shown} |\n")
    sys.stdout.write("\n| short run | worst task | mean | largest share |\n|---|---|---|---|\n")
    rows = {"`uniform`": [learn_briefly("uniform", seed) for seed in range(SHORT_SEEDS)]}
    for prior in PRIORS:
        runs_of = (
            learn_briefly("deficit_learnability", seed, prior_prompts=prior) for seed in range(SHORT_SEEDS)
        )
        rows[f"default, `prior_prompts: {prior}`"] = list(runs_of)
    for name, brief in rows.items():
        cells = " | ".join(f"{mean(run[i] for run in brief):.3f}" for i in range(3))
        sys.stdout.write(f"| {name} | {cells} |\n")
    sys.stdout.write("\n| policy | worst of the others | their mean | share of the task of form |\n")
    sys.stdout.write("|---|---|---|---|\n")
    for policy in POLICIES:
        runs = [learn(policy, seed, with_form=True) for seed in range(SEEDS)]
        cells = " | ".join(f"{mean(run[i] for run in runs):.3f}" for i in (0, 2, 3))
        sys.stdout.write(f"| `{policy}` | {cells} |\n")
    sys.stdout.write("\n| policy | " + " | ".join(TRANSFER) + " |\n|---|" + "---|" * len(TRANSFER) + "\n")
    for policy in TRANSFER_POLICIES:
        pairs = []
        for planted in TRANSFER:
            found = [learn_with_transfer(policy, planted, seed) for seed in range(TRANSFER_SEEDS)]
            pairs.append(" / ".join(f"{mean(run[i] for run in found):.3f}" for i in range(2)))
        sys.stdout.write(f"| `{policy}` | {' | '.join(pairs)} |\n")


if __name__ == "__main__":
    main()
