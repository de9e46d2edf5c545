"""Which quantile a reward is in, and how often each quantile is drawn (``reward_conditioned``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .experience import outcome
from .records import Attempt
from .settings import Task


def quantiles_of(rewards: Sequence[float], number: int) -> list[int]:
    """Quantile of the middle rank of equal rewards; that of the best reward is called the top one.

    Less than 1e-12 of the largest is rounding.
    """
    found = []
    near = 1e-12 * max(abs(r) for r in rewards)
    for r in rewards:
        below, at_most = sum(x < r - near for x in rewards), sum(x <= r + near for x in rewards)
        found.append(number * (below + at_most) // (2 * len(rewards)))
    top = found[rewards.index(max(rewards))]
    return [number - 1 if q == top else q for q in found]


def draws(sizes: dict[int, int], count: int) -> dict[int, int]:
    """Draws of each quantile: its share of the pool, the top one at least an even share."""
    total, top = sum(sizes.values()), max(sizes)
    wanted = {top: max(_ceil(count * sizes[top], total), _ceil(count, len(sizes)))}
    left, rest = count - wanted[top], total - sizes[top]
    for q in sorted(sizes, reverse=True)[1:]:
        wanted[q] = _ceil(left * sizes[q], rest)
        left, rest = left - wanted[q], rest - sizes[q]
    return wanted


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def check_draws(
    task: Task, pool: Sequence[Attempt], chosen: Sequence[tuple[Attempt, int]], count: int
) -> None:
    """Raise ``AssertionError`` unless ``chosen`` is a possible draw: right quantiles, evenly drawn."""
    rewards = [outcome(task, a) or 0.0 for a in pool]
    of = dict(zip([a.name for a in pool], quantiles_of(rewards, task.config["quantiles"]), strict=True))
    sizes = Counter(of.values())
    assert all(of[a.name] == q for a, q in chosen), "a sample is trained under another quantile's token"
    wanted = draws(dict(sizes), count)
    drawn = Counter(q for _, q in chosen)
    assert dict(drawn) == {q: n for q, n in wanted.items() if n}, f"draws {dict(drawn)}, not {wanted}"
    times = Counter(a.name for a, _ in chosen)
    for name, q in of.items():
        low = wanted[q] // sizes[q]
        assert low <= times[name] <= low + 1, f"{name} is drawn {times[name]} times"
