"""Recompute the table of "Curriculum inside a task": ``python docs/simulate_curriculum.py``."""

from __future__ import annotations

import math
import random
import sys
from statistics import mean

from multitask_rl.config.task import CurriculumSpec
from multitask_rl.data import PooledStream, PromptStream, Row


def prompts_to_mastery(spec: CurriculumSpec | None, seed: int, num_rows: int = 200) -> int:
    """Return the draws until the mean pass rate is 0.8 (5000 at most); None: uniform draws.

    Ability grows with the variance of the groups drawn; what is learnt at one of the five levels helps its
    neighbours.
    """
    rng, roll = random.Random(f"difficulty/{seed}"), random.Random(f"rollouts/{seed}")
    rows = [{"id": i, "level": i % 5} for i in range(num_rows)]
    difficulty = [1.5 * row["level"] + rng.gauss(0.0, 0.3) for row in rows]
    ability = [0.5] * 5
    source = PromptStream(rows, task="sim", seed=seed)
    if spec is not None:
        source = PooledStream(rows, task="sim", seed=seed, spec=spec)

    def rate(row: Row) -> float:
        return 1.0 / (1.0 + math.exp(1.5 * (difficulty[row["id"]] - ability[row["level"]])))

    while mean(rate(row) for row in rows) < 0.8 and source.draw < 5000:
        groups = {}
        for draw, row in source.next(8):
            groups[draw] = [float(roll.random() < rate(row)) for _ in range(8)]
            p = mean(groups[draw])
            for level in range(5):
                ability[level] += 0.08 * p * (1.0 - p) * 0.75 ** abs(level - row["level"])
        source.observe(groups, 0)
    return source.draw


def main() -> None:
    """Print the draws to mastery, relative to uniform ones on the same seed: mean and range of 10 seeds."""
    for num_rows in (200, 3000):
        uniform = [prompts_to_mastery(None, seed, num_rows) for seed in range(10)]
        sys.stdout.write(f"{num_rows} prompts: uniform {mean(uniform):.0f} draws\n")
        for by in ("level", "pass_rate"):
            ours = [prompts_to_mastery(CurriculumSpec(by=by), seed, num_rows) for seed in range(10)]
            ratios = [a / b for a, b in zip(ours, uniform, strict=True)]
            found = f"{mean(ratios):.2f} of them ({min(ratios):.2f} to {max(ratios):.2f})"
            sys.stdout.write(f"  by {by}: {found}\n")


if __name__ == "__main__":
    main()
