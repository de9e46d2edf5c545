"""Recompute the table "What it finds, and when" of ``scheduler-and-guard.md`` on simulated metrics.

``python docs/simulate_guard.py`` takes about a minute on one core. Needs numpy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np

from multitask_rl.guard.decision import GuardAction
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.records import TaskEvaluation
from multitask_rl.testing import make_evaluation

LEVELS = {"a": 0.6, "b": 0.3, "c": 0.85, "d": 0.12}
NUM_PROMPTS = 256
FALL_AT = 60
CLEAN_RUNS, CLEAN_EVALUATIONS = 60, 200
FALL_RUNS, FALL_EVALUATIONS = 40, 90

Fall = Callable[[int], float]
"""Part of the level lost, by evaluations since the fall began."""

FALLS: dict[str, Fall] = {
    "15 %": lambda age: 0.15,
    "20 %": lambda age: 0.20,
    "30 %": lambda age: 0.30,
    "1.5 % lost per evaluation": lambda age: 1 - 0.985 ** (age + 1),
}


def first_rollback(
    seed: int, num_evaluations: int, noise: float, fresh: bool, fall: Fall | None
) -> int | None:
    """Return the evaluation at which the guard rolled back, if it did.

    Args:
        seed: of the run.
        num_evaluations: length of the run.
        noise: share of the outcomes drawn afresh at each evaluation; the rest repeats prompt by prompt.
        fresh: offer fresh paired evaluations for confirmation.
        fall: of task ``a``; None = a clean run.
    """
    stream = np.random.default_rng(seed)
    fixed = {task: stream.random(NUM_PROMPTS) for task in LEVELS}
    guard = SafetyGuard()
    guard.bind(LEVELS)

    def evaluate(task: str, level: float, difficulty: np.ndarray, step: int) -> TaskEvaluation:
        redrawn = stream.random(NUM_PROMPTS) < noise
        solved = np.where(redrawn, stream.random(NUM_PROMPTS) < level, difficulty < level)
        return make_evaluation(solved.tolist(), task=task, step=step)

    for step in range(num_evaluations):
        levels = dict(LEVELS)
        if fall is not None and step >= FALL_AT:
            levels["a"] *= 1 - fall(step - FALL_AT)

        def confirm(
            task: str, levels: dict[str, float] = levels, step: int = step
        ) -> tuple[TaskEvaluation, TaskEvaluation]:
            new = stream.random(NUM_PROMPTS)
            return evaluate(task, levels[task], new, step), evaluate(task, LEVELS[task], new, step)

        evaluations = {task: evaluate(task, level, fixed[task], step) for task, level in levels.items()}
        if guard.observe(step, evaluations, confirm if fresh else None).action is GuardAction.rollback:
            return step
    return None


def rows() -> Iterator[str]:
    """Yield the table's rows."""
    for noise in (1.0, 0.2):
        for fresh in (False, True):
            clean = [first_rollback(s, CLEAN_EVALUATIONS, noise, fresh, None) for s in range(CLEAN_RUNS)]
            cells = [
                f"{noise:g}",
                "fresh" if fresh else "stored",
                f"{sum(c is not None for c in clean)} of {CLEAN_RUNS}",
            ]
            for fall in FALLS.values():
                seeds = range(1000, 1000 + FALL_RUNS)
                found = [first_rollback(s, FALL_EVALUATIONS, noise, fresh, fall) for s in seeds]
                delays = [at - FALL_AT for at in found if at is not None and at >= FALL_AT]
                cells.append(f"{len(delays)} of {FALL_RUNS}, median {median(delays) if delays else 'none'}")
            yield f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    head = ["share of noise", "confirmation", "clean runs with an alarm", *FALLS]
    sys.stdout.write(f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n")
    sys.stdout.writelines(rows())
