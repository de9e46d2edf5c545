"""Which of a task's prompts are drawn: pools of difficulty (docs/scheduler-and-guard.md)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .controllers import apportioned
from .settings import Curriculum

UNSEEN = "unseen"


@dataclass
class Range:
    """Of rewards: [0, 1], or what three groups have reached at each end if that goes beyond."""

    lowest: list[float] = field(default_factory=list)
    highest: list[float] = field(default_factory=list)

    def add(self, groups: Sequence[Sequence[float]]) -> None:
        self.lowest = sorted(self.lowest + [min(own) for own in groups])[:3]
        self.highest = sorted(self.highest + [max(own) for own in groups])[-3:]

    @property
    def ends(self) -> tuple[float, float]:
        if not self.lowest:
            return 0.0, 1.0
        low, high = self.lowest[-1], self.highest[0]
        if low >= high:  # too few groups differ
            low, high = self.lowest[0], self.highest[-1]
        if low >= 0.0 and high <= 1.0:
            return 0.0, 1.0
        return low, high if high > low else low + 1.0

    def clipped(self, rewards: Sequence[float]) -> list[float]:
        low, high = self.ends
        return [min(high, max(low, r)) for r in rewards]

    def place(self, value: float) -> float:
        low, high = self.ends
        return min(1.0, max(0.0, (value - low) / (high - low)))


@dataclass
class Seen:
    """What the groups of a pool showed: averages with a memory of 20 groups."""

    groups: int = 0
    mean: float = 0.0
    spreads: int = 0
    variance: float = 0.0

    def add(self, rewards: Sequence[float]) -> None:
        self.groups += 1
        mean = math.fsum(rewards) / len(rewards)
        self.mean += max(0.05, 1.0 / self.groups) * (mean - self.mean)
        if len(rewards) > 1:
            self.spreads += 1
            variance = math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)
            self.variance += max(0.05, 1.0 / self.spreads) * (variance - self.variance)

    def learnability(self, ends: Range) -> float:
        """Mean variance within groups; the highest, 1/4, counts as four groups."""
        low, high = ends.ends
        p = ends.place(self.mean)
        own = self.variance / (high - low) ** 2 if self.spreads else p * (1.0 - p)
        return (self.groups * own + 4 * 0.25) / (self.groups + 4)


@dataclass
class Drawn:
    row: int
    pool: str
    before: int
    """When the row was drawn before."""


class Pools:
    """The rows of one task.

    Args:
        order: the rows, in the order of their first draws.
        values: of the column that sorts the rows; None: the pass rate does.
        late_steps: most steps that a group's rewards may come late.
    """

    def __init__(
        self,
        settings: Curriculum,
        order: Sequence[int],
        values: Mapping[int, float | str] | None,
        late_steps: int,
    ) -> None:
        self.settings, self.late_steps = settings, late_steps
        self.last = {row: i - len(order) for i, row in enumerate(order)}
        """Row -> its newest draw; below 0: it had none."""
        if values is None:
            self.names = [*map(str, range(settings.pools)), UNSEEN]
            self.pool_of = dict.fromkeys(order, UNSEEN)
        else:
            self.pool_of = sorted_into(values, settings.pools)
            self.names = sorted(set(self.pool_of.values()), key=int)
        self.carry: dict[str, float] = {}
        self.carries: dict[int, dict[str, float]] = {}
        """First draw of a call -> ``carry`` before it."""
        self.seen = {name: Seen() for name in self.names}
        self.ends = Range()
        self.served = {name: Seen() for name in self.names}
        self.served_ends = Range()
        self.rates: dict[int, float] = {}
        self.drawn: dict[int, Drawn] = {}
        """Draws whose groups may still come."""
        self.missed: dict[int, int] = {}
        """Draw -> first step that saw a group drawn as late or later, and not this one."""
        self.not_judged: set[int] = set()
        self.not_served: set[int] = set()
        self.step_judged = Counter[str]()
        self.step_served = Counter[str]()

    def forget_late(self) -> None:
        """Expect no late groups any more; they say nothing of their rows."""
        if self.late_steps:
            self.drawn, self.missed = {}, {}

    def members(self, name: str) -> list[int]:
        """Rows of a pool, the one drawn longest ago first."""
        return sorted((r for r, p in self.pool_of.items() if p == name), key=self.last.__getitem__)

    def shares(self) -> dict[str, float]:
        """``floor n_i / n``, the rest by ``n_i L_i``; rows that could not be judged teach nothing."""
        sizes = Counter(self.pool_of.values())
        without = Counter(self.pool_of[row] for row in self.not_judged)
        gains = {n: (sizes[n] - without[n]) * self.seen[n].learnability(self.ends) for n in self.names}
        total, gain = len(self.pool_of), math.fsum(gains.values())
        floor = self.settings.floor
        return {
            n: floor * sizes[n] / total + (1.0 - floor) * gains[n] / gain if gain else sizes[n] / total
            for n in self.names
        }

    def next(self, count: int, first: int) -> list[int]:
        """Return rows for the draws from ``first`` on; no row twice while there are others."""
        self.carries[first] = self.carry
        ranks = {name: i for i, name in enumerate(self.names)}
        counts, self.carry = apportioned(self.shares(), count, self.carry, ranks)
        sizes = Counter(self.pool_of.values())
        while count <= len(self.pool_of) and any(counts[n] > sizes[n] for n in self.names):
            full = next(n for n in self.names if counts[n] > sizes[n])
            free = max(self.names, key=lambda n: sizes[n] - counts[n])
            counts[full], counts[free] = counts[full] - 1, counts[free] + 1
        rows = []
        for name in self.names:
            for _ in range(counts[name]):
                row, draw = self.members(name)[0], first + len(rows)
                self.drawn[draw] = Drawn(row, name, self.last[row])
                self.last[row] = draw
                rows.append(row)
        return rows

    def undo(self, first: int) -> None:
        """Forget the draws from ``first`` on; they will be made anew."""
        for draw in sorted((d for d in self.drawn if d >= first), reverse=True):
            own = self.drawn.pop(draw)
            self.last[own.row] = own.before
        self.carry = self.carries[first]

    def skip(self, rows: Mapping[int, int]) -> None:
        """Go on behind draws of which nothing was learnt: draw -> row. No group comes any more."""
        for draw, row in rows.items():
            self.last[row] = draw
        self.drawn, self.missed = {}, {}

    def observe(
        self, judged: Mapping[int, Sequence[float]], served: Mapping[int, Sequence[float]], step: int
    ) -> None:
        """Learn from a step's groups: by draw, rewards to learn from, and those that a user would see."""
        self.step_judged, self.step_served = Counter(), Counter()
        self.ends.add([own for own in judged.values() if own])
        self.served_ends.add([own for own in served.values() if own])
        for draw, rewards in judged.items():
            if (own := self.drawn.pop(draw, None)) is None:
                continue
            if draw in served:
                self.step_served[own.pool] += 1
                self.served[own.pool].add(self.served_ends.clipped(served[draw]))
                self.not_served.discard(own.row)
            else:
                self.not_served.add(own.row)
            if not rewards:
                self.not_judged.add(own.row)
                continue
            self.not_judged.discard(own.row)
            usual = self.ends.clipped(rewards)
            self.step_judged[own.pool] += 1
            self.seen[own.pool].add(usual)
            if UNSEEN in self.names:
                mean = math.fsum(usual) / len(usual)
                rate = 0.5 * (self.rates.get(own.row, mean) + mean)
                self.rates[own.row] = rate
                number = math.floor(self.settings.pools * self.ends.place(rate))
                self.pool_of[own.row] = str(min(self.settings.pools - 1, number))
        for draw in [d for d in self.drawn if d <= max(judged, default=-1)]:
            if step >= self.missed.setdefault(draw, step) + self.late_steps:
                row = self.drawn.pop(draw).row
                self.not_judged.add(row)
                self.not_served.add(row)

    def shift(self) -> float:
        """Mean reward of even draws less that of the step's: ``sum_i (n_i / n - d_i) m_i``."""
        sizes = Counter(p for row, p in self.pool_of.items() if row not in self.not_served)
        known = [name for name in self.names if self.served[name].groups]
        total, draws = sum(sizes[n] for n in known), self.step_served.total()
        if not total or not draws:
            return 0.0
        return math.fsum(
            (sizes[n] / total - self.step_served[n] / draws) * self.served[n].mean for n in known
        )

    def metrics(self) -> dict[str, float]:
        total = max(1, self.step_judged.total())
        found = {f"pool/{n}/share": self.step_judged[n] / total for n in self.names}
        rates = {
            f"pool/{n}/pass_rate": self.ends.place(own.mean) for n, own in self.seen.items() if own.groups
        }
        return found | rates


def sorted_into(values: Mapping[int, float | str], number: int) -> dict[int, str]:
    """A pool per value, or at most ``number`` pools of about equal size; equal values are not parted.

    A pool ends with the value by which it and those before have their even part of the rows. A value that has
    as many alone begins one.
    """
    distinct = sorted(set(values.values()))  # type: ignore[type-var]
    if len(distinct) <= number:
        return {row: str(distinct.index(value)) for row, value in values.items()}
    pool, before, pools = 0, 0, {}
    for value in distinct:
        own = sum(other == value for other in values.values())
        fills_one = before > 0 and own * number >= len(values) and pool + 1 < number
        if before * number >= len(values) * (pool + 1) or fills_one:
            pool += 1
        pools[value] = str(pool)
        before += own
    return {row: pools[value] for row, value in values.items()}
