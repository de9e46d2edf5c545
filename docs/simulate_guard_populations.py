"""Recompute "Small populations" of ``scheduler-and-guard.md``: false alarms and misses by metric and size.

``python docs/simulate_guard_populations.py RUNS`` simulates so many runs per cell (default 20, half an hour
on one core): clean runs of 100 evaluations, and falls that begin at evaluation 40. Needs numpy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from multitask_rl.guard.decision import GuardAction
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.records import Direction, Statistic, TaskEvaluation
from multitask_rl.statistics.intervals import summarise
from multitask_rl.testing import make_evaluation

KINDS = ("primary 0/1", "primary real", "violation_rate", "cost", "reward/<name>")
SIZES = (13, 32, 64, 256)
RATES = (0.02, 0.1, 0.3, 0.5)
NUM_PROMPTS = 256
NUM_CLEAN, FALL_AT, MOST_LATE = 100, 40, 10
THRESHOLD, DETECTABLE_Z = 0.15, 3.29
"""A fall is as large as the threshold, and at least what two evaluations can tell: what a one-sided test at
5 % finds with 95 % probability."""


@dataclass(frozen=True)
class Cell:
    """A watched metric and its population."""

    kind: str
    size: int
    """Prompts concerned, of 256."""
    rate: float
    noise: float = 1.0
    """Share of the outcomes drawn afresh by each evaluation; the rest repeats prompt by prompt."""
    fresh: bool = True
    """Fresh paired evaluations confirm; else the stored ones."""

    @property
    def is_bad(self) -> bool:
        """Lower values are better."""
        return self.kind in ("violation_rate", "cost")

    def statistic(self, values: np.ndarray, concerned: np.ndarray) -> Statistic:
        """Return what an evaluation carries."""
        everyone = np.full(NUM_PROMPTS, np.nan)
        everyone[concerned] = values
        direction = Direction.lower if self.is_bad else Direction.higher
        low, high = (-math.inf, math.inf) if self.kind == "primary real" else (0.0, 1.0)
        return summarise(everyone.tolist(), direction=direction, low=low, high=high, keep=range(NUM_PROMPTS))

    def fall(self) -> float | None:
        """Return how much of the rate is lost; None: the population cannot show a fall."""
        if self.kind == "primary real":  # scores around -2 with spread 1
            return max(2 * THRESHOLD, DETECTABLE_Z * math.sqrt(2 / self.size))
        n = self.size + 4
        rate = (self.rate * self.size + 2) / n
        detectable = DETECTABLE_Z * math.sqrt(2 * rate * (1 - rate) / n)
        lost = max(THRESHOLD * (1 - self.rate if self.is_bad else self.rate), detectable)
        return lost if lost <= (1 - self.rate if self.is_bad else self.rate) else None


def first_rollback(
    cell: Cell, seed: int, num_evaluations: int, *, fall: float = 0.0, gain: float = 0.0
) -> int | None:
    """Return the evaluation at which the guard rolled back, if it did.

    Args:
        cell: what is watched.
        seed: of the run.
        num_evaluations: length of the run.
        fall: loss of the rate from evaluation 40 on.
        gain: what the rate gains over the first 50 evaluations: training that works.
    """
    stream = np.random.default_rng(seed)
    concerned = stream.permutation(NUM_PROMPTS)[: cell.size]
    fixed = stream.random((2, cell.size))
    primary = cell.kind.startswith("primary")
    guard = SafetyGuard(monitor_metrics=["a" if primary else "a/watched"])
    guard.bind(["a"])

    def evaluate(step: int, better: float, fixed: np.ndarray) -> TaskEvaluation:
        drawn = np.where(stream.random(cell.size) < cell.noise, stream.random((2, cell.size)), fixed)
        values = (drawn[0] < cell.rate + (-better if cell.is_bad else better)).astype(float)
        if cell.kind == "cost":
            values *= 0.5 + 0.5 * drawn[1]
        if cell.kind == "primary real":
            values = math.sqrt(12) * (drawn[0] - 0.5) - 2.0 + better
        statistic = cell.statistic(values, concerned)
        whole = make_evaluation([1.0, 0.0] * 8, task="a", step=step, metrics={"watched": statistic})
        if primary:
            whole.primary = statistic
        return whole

    for step in range(num_evaluations):
        good = gain * min(1.0, step / 50)
        now = good - (fall if step >= FALL_AT else 0.0)

        def confirm(
            task: str, step: int = step, now: float = now, good: float = good
        ) -> tuple[TaskEvaluation, TaskEvaluation]:
            prompts = stream.random((2, cell.size))
            return evaluate(step, now, prompts), evaluate(step, good, prompts)

        decision = guard.observe(step, {"a": evaluate(step, now, fixed)}, confirm if cell.fresh else None)
        if decision.action in (GuardAction.rollback, GuardAction.stop):
            return step
    return None


def cells(kind: str, size: int) -> list[Cell]:
    """Return every rate, noise and confirmation of a metric and population."""
    rates = (0.5,) if kind == "primary real" else RATES
    return [
        Cell(kind, size, r, noise, fresh) for r in rates for noise in (1.0, 0.2) for fresh in (False, True)
    ]


def rows(runs: int) -> Iterator[str]:
    """Yield the table's rows."""
    for kind in KINDS:
        for size in SIZES:
            own = cells(kind, size)
            clean = [first_rollback(c, s, NUM_CLEAN) for c in own for s in range(runs)]
            found = [
                first_rollback(c, 5000 + s, FALL_AT + MOST_LATE, fall=fall)
                for c in own
                if (fall := c.fall()) is not None
                for s in range(runs)
            ]
            hits = sum(at is not None and at >= FALL_AT for at in found)
            alarms = sum(at is not None for at in clean)
            shown = f"{hits} of {len(found)}" if found else "none can show"
            yield f"| `{kind}` | {size} | {alarms} of {len(clean)} | {shown} |\n"


if __name__ == "__main__":
    sys.stdout.write(
        "| metric | prompts concerned | clean runs with a rollback | falls found within 10 |\n"
        "|---|---|---|---|\n"
    )
    for row in rows(int(sys.argv[1]) if len(sys.argv) > 1 else 20):
        sys.stdout.write(row)
        sys.stdout.flush()
