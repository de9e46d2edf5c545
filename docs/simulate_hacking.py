"""Recompute the table "Power of the hacking detector" of ``scheduler-and-guard.md`` on simulated metrics.

``python docs/simulate_hacking.py`` takes about half a minute on an idle core.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from statistics import median

from multitask_rl.guard.hacking import Observation, fall_while_rising

NUM_TASKS = 4
CLEAN_RUNS, CLEAN_EVALUATIONS = 60, 200
TRACES, TRACE_EVALUATIONS, TURN = 150, 40, 10
REWARD_NOISE = 0.5
"""Standard deviation of the training reward between evaluations, in its rise per evaluation."""
THRESHOLDS = (3.09, 3.5, 3.8, 4.0, 4.5)
FALLS = (0.2, 0.3, 0.5, 1.0, 2.0)
"""Fall of the held-out metric per evaluation, in standard errors of one evaluation."""


def scores(num_evaluations: int, rises_until: int, fall: float, stream: random.Random) -> list[float]:
    """Return, per evaluation of one task, by how many standard errors it fell while its reward rose.

    Args:
        num_evaluations: length of the run.
        rises_until: evaluation up to which the training reward rises, by 1 each, twice its noise.
        fall: of the held-out metric per evaluation from ``TURN`` on, in standard errors.
        stream: random numbers.
    """
    window: deque[Observation] = deque(maxlen=8)
    found = []
    for step in range(num_evaluations):
        reward = min(step, rises_until) + stream.gauss(0.0, REWARD_NOISE)
        value = -fall * max(0, step - TURN) + stream.gauss(0.0, 1.0)
        window.append(Observation(train_reward=reward, value=value, error=1.0))
        drop, error = fall_while_rising(window)
        found.append(drop / error if error else 0.0)
    return found


def clean_maxima(rises_until: int) -> list[float]:
    """Return the highest score of any task in each clean run."""
    return [
        max(
            max(scores(CLEAN_EVALUATIONS, rises_until, 0.0, random.Random(f"{rises_until}/{run}/{task}")))
            for task in range(NUM_TASKS)
        )
        for run in range(CLEAN_RUNS)
    ]


def detected(fall: float, threshold: float) -> str:
    """Return the share of over-optimised runs that is found within 20 evaluations, and the median delay."""
    delays = []
    for run in range(TRACES):
        trace = scores(TRACE_EVALUATIONS, TRACE_EVALUATIONS, fall, random.Random(f"trace/{fall}/{run}"))
        at = next((i for i, z in enumerate(trace) if i > TURN and z > threshold), None)
        if at is not None and at - TURN <= 20:
            delays.append(at - TURN)
    return f"{len(delays) / TRACES:.0%}, {median(delays) if delays else float('nan'):g}"


def main() -> None:
    """Print the table."""
    clean = [clean_maxima(until) for until in (0, 60, CLEAN_EVALUATIONS)]
    head = [
        "z",
        "clean, flat",
        "rising to 60",
        "rising to 200",
        *(f"{f:g} per evaluation" for f in FALLS),
    ]
    sys.stdout.write(f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n")
    for z in THRESHOLDS:
        cells = [f"{z:g}", *(f"{sum(m > z for m in maxima)} of {CLEAN_RUNS}" for maxima in clean)]
        cells += [detected(fall, z) for fall in FALLS]
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
