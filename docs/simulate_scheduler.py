"""Recompute the table of "Policies in simulation": ``python docs/simulate_scheduler.py``."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping
from statistics import mean

from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.records import TaskStats

POLICIES = ("uniform", "deficit_learnability", "mt_grpo", "straggler", "learnability", "bandit", "patience")
STARTS = {"arithmetic": 0.35, "sort": 0.1, "code": 0.4, "safe": 0.5}
TAUS = {"arithmetic": 1100.0, "sort": 5500.0, "code": 1000.0, "safe": 600.0}
"""Informative groups after which the way to 1 is shorter by a factor of e."""
GROUP, PROMPTS, SEEDS = 8, 16, 5


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
    )


def bound(policy: str, weights: Mapping[str, float]) -> DynamicTaskWeightScheduler:
    """Return a scheduler of tasks with rewards in [0, 1]."""
    scheduler = DynamicTaskWeightScheduler(weights, policy=policy)
    scheduler.bind(list(weights), reward_ranges=dict.fromkeys(weights, (0.0, 1.0)))
    return scheduler


def learn(policy: str, seed: int, steps: int = 1500) -> tuple[float, float, float]:
    """Return the worst task's level at the end, its mean over the steps, and the tasks' mean at the end."""
    scheduler, stream = bound(policy, dict.fromkeys(STARTS, 1.0)), random.Random(seed)
    practice, worst, levels = dict.fromkeys(STARTS, 0), [], dict(STARTS)
    for step in range(steps):
        if step % 25 == 0:
            held_out = {t: mean(stream.random() < p for _ in range(256)) for t, p in levels.items()}
            errors = {t: math.sqrt(level * (1.0 - level) / 256) for t, level in held_out.items()}
            scheduler.calibrate(held_out, step, errors)
        quotas = scheduler.quotas(PROMPTS, step)
        stats = {t: sample(t, levels[t], n, stream) for t, n in quotas.items() if n}
        scheduler.update(stats, step)
        for task, own in stats.items():
            practice[task] += own.num_informative
            levels[task] = 1.0 - (1.0 - STARTS[task]) * math.exp(-practice[task] / TAUS[task])
        worst.append(min(levels.values()))
    return worst[-1], mean(worst), mean(levels.values())


def off(policy: str, seed: int, steps: int = 600) -> list[float]:
    """Return how far the shares lie from the weights 1:2:1 while three tasks stand at one level."""
    weights = {"a": 0.25, "b": 0.5, "c": 0.25}
    scheduler, stream, found = bound(policy, weights), random.Random(seed), []
    for step in range(steps):
        quotas = scheduler.quotas(PROMPTS, step)
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


if __name__ == "__main__":
    main()
