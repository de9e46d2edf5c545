"""The guard's verdicts over sequences of evaluations, against the reference's guard."""

from __future__ import annotations

import math
import random

import pytest

from multitask_rl.guard.decision import GuardAction
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.records import Direction
from multitask_rl.testing import make_evaluation

from .naive.guard import Guard
from .naive.records import number

NUM_SEQUENCES, NUM_EVALUATIONS = 60, 14


def levels(stream: random.Random) -> list[float]:
    """A level that wanders, and jumps or falls at times."""
    level, found = stream.uniform(0.2, 0.9), []
    for _ in range(NUM_EVALUATIONS):
        if stream.random() < 0.3:
            level *= stream.uniform(0.3, 1.6)
        level = min(0.97, max(0.03, level + stream.gauss(0, 0.02)))
        found.append(level)
    return found


def values(stream: random.Random, level: float, kind: str, ease: list[float]) -> list[float]:
    """One value per prompt: right or wrong, in quarters, or any number; some are missing."""
    hits = [1.0 if e + stream.gauss(0, 0.1) < level else 0.0 for e in ease]
    if kind == "quarters":
        hits = [stream.choice((0.25, 0.5, 1.0)) * hit for hit in hits]
    if kind == "number":
        hits = [10.0 * hit + stream.gauss(0, 1) for hit in hits]
    return [math.nan if stream.random() < 0.05 else hit for hit in hits]


@pytest.mark.parametrize("kind", ["binary", "quarters", "number"])
def test_alarms_and_good_weights_are_those_of_the_reference(kind: str) -> None:
    refused = 0
    for seed in range(NUM_SEQUENCES):
        stream = random.Random(f"{kind} {seed}")
        direction = stream.choice(["higher", "lower"])
        ends = None if kind == "number" else (0.0, 1.0)
        keep = range(stream.choice((12, 40, 100)))
        ease = {task: [stream.random() for _ in keep] for task in "ab"}
        guard, reference = SafetyGuard(), Guard(["a", "b"])
        guard.bind("ab")
        for step, (first, second) in enumerate(zip(levels(stream), levels(stream), strict=True)):
            drawn = {
                task: values(stream, level, kind, ease[task]) for task, level in (("a", first), ("b", second))
            }
            evaluations = {
                task: make_evaluation(own, task=task, step=step, direction=Direction(direction))
                for task, own in drawn.items()
            }
            numbers = {task: number(own, list(keep), direction, ends) for task, own in drawn.items()}
            assert all(found is not None for found in numbers.values())
            decision = guard.observe(step, evaluations)
            alarm, good = reference.observe(numbers, dict.fromkeys("ab", ends))
            assert decision.judged_good == good, (seed, step, decision)
            assert alarm or decision.action in (GuardAction.keep, GuardAction.warn), (seed, step, decision)
            refused += decision.action is GuardAction.warn and "last judged good" in decision.reason
            if alarm:
                break
    assert refused > 5
