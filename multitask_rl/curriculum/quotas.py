"""From shares to whole prompts: the largest-remainder method, with the remainders carried to the next step.

The prompts a task got so far are then within one or two of its exact share. The caller keeps the carry.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping


def normalise(weights: Mapping[str, float]) -> dict[str, float]:
    """Return ``weights`` divided by their sum; equal shares when the sum is not positive."""
    total = math.fsum(weights.values())
    if not total > 0.0 or not math.isfinite(total):
        return {task: 1.0 / len(weights) for task in weights}
    return {task: weight / total for task, weight in weights.items()}


def raise_to_floors(probs: Mapping[str, float], floors: Mapping[str, float]) -> dict[str, float]:
    """Raise shares below their floor (missing = 0, sum at most 1) to the floor and scale the others down.

    >>> raise_to_floors({"a": 0.5, "b": 0.5, "c": 0.0}, {"c": 0.5})
    {'a': 0.25, 'b': 0.25, 'c': 0.5}
    """
    held: set[str] = set()
    while True:
        free = 1.0 - math.fsum(floors.get(task, 0.0) for task in held)
        rest = math.fsum(p for task, p in probs.items() if task not in held)
        scale = free / rest if rest > 0.0 else 0.0
        low = {t for t in probs if t not in held and probs[t] * scale < floors.get(t, 0.0)}
        if not low:
            break
        held |= low
    return normalise({t: floors.get(t, 0.0) if t in held else p * scale for t, p in probs.items()})


def apportion(
    shares: Mapping[str, float], total: int, carry: Mapping[str, float], tie_break: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, float]]:
    """Split ``total`` prompts by ``shares`` (sum 1) and ``carry``; return prompts per task and the new carry.

    ``carry`` is what earlier steps owe a task, in prompts; below 0, it got more than its share. A task is
    entitled to ``share * (total - sum of the carries) + carry`` prompts, with the carries of the tasks that
    have a share. It gets the integer part, at least 0; the remaining prompts go to the tasks with the largest
    remainders. ``tie_break`` ranks tasks with equal remainders. A task with share 0 gets nothing and is owed
    nothing.

    Raises:
        ValueError: ``total`` is negative, or no task has a share above 0.

    >>> apportion({"a": 0.5, "b": 0.5}, 3, {}, {"a": 0, "b": 1})
    ({'a': 2, 'b': 1}, {'a': -0.5, 'b': 0.5})
    """
    if total < 0:
        raise ValueError(f"prompts to split must be >= 0, got {total}")
    active = [task for task, share in shares.items() if share > 0.0]
    if total and not active:
        raise ValueError(f"no task has a share above 0, so {total} prompts cannot be split")
    # The carry of a task that gets no prompts now (frozen, removed) is spread over the others.
    lost = math.fsum(carry.get(task, 0.0) for task in active)
    owed = {task: shares[task] * (total - lost) + carry.get(task, 0.0) for task in active}
    counts = {task: max(0, math.floor(owed.get(task, 0.0))) for task in shares}
    missing = total - sum(counts.values())
    change = 1 if missing > 0 else -1

    def rank(task: str) -> tuple[float, int, str]:
        # Rounded: rounding errors must not decide between remainders that are mathematically equal.
        return (-change * round(owed[task] - counts[task], 9), tie_break.get(task, 0), task)

    ranks = [rank(task) for task in active if change > 0 or counts[task] > 0]
    heapq.heapify(ranks)
    for _ in range(abs(missing)):
        _, _, task = heapq.heappop(ranks)
        counts[task] += change
        if change > 0 or counts[task] > 0:
            heapq.heappush(ranks, rank(task))
    return counts, {task: owed[task] - counts[task] for task in active}
