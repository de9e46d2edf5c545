"""A stream that draws learnable prompts more often: rows are sorted into pools of difficulty."""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from multitask_rl.boundary.printable import counted
from multitask_rl.config.task import PASS_RATE, CurriculumSpec, TaskSpec
from multitask_rl.curriculum.difficulty import PoolEstimate, RewardRange, pool_shares
from multitask_rl.curriculum.quotas import apportion
from multitask_rl.curriculum.signal import place
from multitask_rl.data.readers import Row, Rows, StreamedRows
from multitask_rl.data.stream import PromptStream
from multitask_rl.errors import ConfigError, DataError
from multitask_rl.records import Event
from multitask_rl.seeding import random_stream

logger = logging.getLogger(__name__)

UNSEEN = "unseen"
_ROW_GAIN = 0.5
"""Weight of a row's newest group in its average; large, because the policy changes between its groups."""
_REPORTED_MOVE = 0.15
"""An event reports that this share of the draws has moved between pools since the last event."""


class PooledStream(PromptStream):
    """Gives the rows of one task forever, by pools whose shares follow their learnability.

    Pools are fixed by a column of the rows, or follow the observed pass rate: the moving average of the mean
    reward of a row's groups. Rows that were never drawn form their own pool, which counts as most learnable
    until measured. A row that could not be judged when last drawn counts as one that teaches nothing. Within
    a pool the row drawn longest ago is next. Shares become whole draws by largest remainder with carry
    (``curriculum/quotas.py``).

    Draws depend on the seed and on the observed rewards; ``state_dict`` holds both. ``spec.by`` must be set.
    ``late_steps``: most steps that a group may come after its batch; later groups are ignored.

    Raises:
        DataError: the column does not sort the rows into pools.
    """

    def __init__(
        self, rows: Rows, *, task: str, seed: int, spec: CurriculumSpec, late_steps: int = 0
    ) -> None:
        super().__init__(rows, task=task, seed=seed)
        self._spec = spec
        self._late_steps = late_steps
        self._start()

    def _start(self) -> None:
        order = list(range(len(self._rows)))
        seed, task = self._shuffled_by
        random_stream(seed, "data", task, 0).shuffle(order)
        if self._spec.by == PASS_RATE:
            edges = [i / self._spec.pools for i in range(self._spec.pools + 1)]
            self._labels = [f"{PASS_RATE} {a:.2f} to {b:.2f}" for a, b in itertools.pairwise(edges)]
            names = [*map(str, range(self._spec.pools)), UNSEEN]
            pool_of = [UNSEEN] * len(self._rows)
        else:
            self._labels, members = pools_by_column(self._rows, self._spec, f"tasks.{self._task}")
            names, pool_of = [str(i) for i in range(len(self._labels))], [str(i) for i in members]
        self._pools: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in names}
        for index in order:
            self._pools[pool_of[index]][index] = None
        self._estimates = {name: PoolEstimate() for name in names}
        self._scale = RewardRange()
        self._rates: dict[int, float] = {}
        self._carry: dict[str, float] = {}
        self._pending: dict[int, tuple[int, str]] = {}
        self._missed: dict[int, int] = {}
        self._last_draw: dict[int, int] = {}
        self._unjudged: set[int] = set()
        """Rows that could not be judged when last drawn: none of the group was scored, or it is too long."""
        self._reported = self._shares()
        self._served = {name: PoolEstimate() for name in names}
        self._served_scale = RewardRange()
        self._unserved: set[int] = set()
        """Rows of which every response failed when last drawn, and those that are too long."""
        self._step_draws: Counter[str] = Counter()
        self._step_served: Counter[str] = Counter()

    def next(self, n: int) -> list[tuple[int, Row]]:
        """Return the next ``n`` rows, each with its draw number; no row twice while there are others."""
        rank = {name: i for i, name in enumerate(self._pools)}
        counts, self._carry = apportion(self._shares(), n, self._carry, rank)
        if n <= len(self._rows):  # draws beyond a pool's size move to the pools with most room
            room = {name: len(self._pools[name]) - count for name, count in counts.items()}
            for name in [name for name, left in room.items() if left < 0]:
                for _ in range(-room[name]):
                    other = max(room, key=lambda o: room[o])
                    counts[name], counts[other] = counts[name] - 1, counts[other] + 1
                    room[name], room[other] = room[name] + 1, room[other] - 1
        rows: list[tuple[int, Row]] = []
        for name, count in counts.items():
            pool = self._pools[name]
            for _ in range(count):
                index = next(iter(pool))
                pool.move_to_end(index)
                self._pending[self._draw] = (index, name)
                self._last_draw[index] = self._draw
                rows.append((self._draw, self._rows[index]))
                self._draw += 1
        return rows

    def observe(
        self,
        groups: Mapping[int, Sequence[float]],
        step: int,
        served: Mapping[int, Sequence[float]] | None = None,
    ) -> list[Event]:
        """Learn what the groups of ``step`` earned; return an event when the shares have moved.

        Args:
            groups: draw number -> rewards of the responses that the algorithm learns from; empty = none could
                be judged: it teaches nothing.
            step: the step.
            served: draw number -> rewards of the responses that a user would see, rejected ones among them;
                empty or missing = all of them failed. None: those of ``groups``.
        """
        served = groups if served is None else served
        self._step_draws, self._step_served = Counter(), Counter()
        self._scale.observe(rewards for rewards in groups.values() if rewards)
        self._served_scale.observe(rewards for rewards in served.values() if rewards)
        for draw, rewards in groups.items():
            index, pool = self._pending.pop(draw, (-1, ""))
            if index < 0:
                continue
            if seen := served.get(draw):
                self._step_served[pool] += 1
                self._served[pool].observe(self._served_scale.clip(seen))
                self._unserved.discard(index)
            else:
                self._unserved.add(index)
            if rewards:
                self._step_draws[pool] += 1
                usual = self._scale.clip(rewards)
                self._estimates[pool].observe(usual)
                self._unjudged.discard(index)
                if self._spec.by == PASS_RATE:
                    mean = math.fsum(usual) / len(usual)
                    old = self._rates.get(index, mean)
                    self._rates[index] = rate = old + _ROW_GAIN * (mean - old)
                    number = int(place(rate, *self._scale.scale) * self._spec.pools)
                    for rows in self._pools.values():
                        rows.pop(index, None)
                    self._add(index, self._pools[str(min(number, self._spec.pools - 1))])
            else:
                self._unjudged.add(index)
        # forget earlier draws that cannot come any more: too late, or too long for the model
        last = max(groups, default=-1)
        for draw in [d for d in self._pending if d <= last]:
            if step - self._missed.setdefault(draw, step) >= self._late_steps:
                index, _ = self._pending.pop(draw)
                self._unjudged.add(index)
                self._unserved.add(index)
        self._missed = {draw: since for draw, since in self._missed.items() if draw in self._pending}
        return self._report(step)

    def _add(self, index: int, pool: OrderedDict[int, None]) -> None:
        """Add a row to ``pool`` in the order of draws; groups may come in another one."""
        own = self._last_draw[index]
        later = list(itertools.takewhile(lambda o: self._last_draw.get(o, -1) > own, reversed(pool)))
        pool[index] = None
        for other in reversed(later):
            pool.move_to_end(other)

    def shift(self) -> float:
        """Return the mean reward of uniformly drawn prompts minus that of the last observed step.

        ``sum_i (n_i / n - d_i) * m_i`` over the measured pools: share of the prompts, share of the draws,
        mean served reward. Without this correction the task's level would fall when harder prompts are drawn.
        """
        known = self._num_without(self._unserved)
        sizes = {name: known[name] for name, e in self._served.items() if e.groups}
        size, draws = sum(sizes.values()), self._step_served.total()
        if not size or not draws:
            return 0.0
        return math.fsum(
            (n / size - self._step_served[name] / draws) * self._served[name].mean
            for name, n in sizes.items()
        )

    def metrics(self) -> dict[str, float]:
        """Return ``pool/<i>/share`` of the judged draws last observed, ``pool/<i>/pass_rate`` where known."""
        total = max(1, self._step_draws.total())
        numbers: dict[str, float] = {}
        for name, estimate in self._estimates.items():
            numbers[f"pool/{name}/share"] = self._step_draws[name] / total
            if estimate.groups:
                numbers[f"pool/{name}/pass_rate"] = estimate.pass_rate(self._scale)
        return numbers

    def _num_without(self, rows: Collection[int]) -> dict[str, int]:
        """Return the number of rows by pool, those in ``rows`` left out."""
        return {name: len(pool) - sum(index in pool for index in rows) for name, pool in self._pools.items()}

    def _shares(self) -> dict[str, float]:
        sizes, judged = self._num_without(()), self._num_without(self._unjudged)
        # what cannot be judged teaches nothing: it has the floor alone
        learnability = {
            name: e.learnability(self._scale) * judged[name] / max(1, sizes[name])
            for name, e in self._estimates.items()
        }
        return pool_shares(sizes, learnability, self._spec.floor)

    def _report(self, step: int) -> list[Event]:
        shares, before = self._shares(), self._reported
        if 0.5 * math.fsum(abs(shares[name] - before[name]) for name in shares) < _REPORTED_MOVE:
            return []
        self._reported = shares
        name = max(shares, key=lambda o: shares[o] - before[o])
        estimate = self._estimates[name]
        rate = estimate.pass_rate(self._scale)
        known = "no pass rate yet" if math.isnan(rate) else f"pass rate {rate:.2f}"
        label = "never asked" if name == UNSEEN else self._labels[int(name)]
        reason = (
            f"share of pool {name} ({label}) {before[name]:.2f} -> {shares[name]:.2f}: "
            f"{counted(len(self._pools[name]), 'prompt')}, {known}, "
            f"learnability {estimate.learnability(self._scale):.3f}"
        )
        data = {
            "from": before,
            "to": shares,
            "learnability": {o: e.learnability(self._scale) for o, e in self._estimates.items()},
            "sizes": {o: len(pool) for o, pool in self._pools.items()},
        }
        event = Event(step=step, source="curriculum", kind="pools", reason=reason, task=self._task, data=data)
        return [event]

    def state_dict(self) -> dict[str, Any]:
        """Return cursor, pools and estimates, JSON-able."""
        return {
            **super().state_dict(),
            "curriculum": {
                "spec": asdict(self._spec),
                "pools": {name: list(pool) for name, pool in self._pools.items()},
                "estimates": {name: asdict(e) for name, e in self._estimates.items()},
                "scale": asdict(self._scale),
                "rates": {str(index): rate for index, rate in self._rates.items()},
                "carry": dict(self._carry),
                "pending": {str(draw): list(where) for draw, where in self._pending.items()},
                "missed": {str(draw): since for draw, since in self._missed.items()},
                "reported": dict(self._reported),
                "served": {name: asdict(e) for name, e in self._served.items()},
                "served_scale": asdict(self._served_scale),
                "last_draw": {str(index): draw for index, draw in self._last_draw.items()},
                "unjudged": sorted(self._unjudged),
                "unserved": sorted(self._unserved),
            },
        }

    def undo(self, earlier: Mapping[str, Any]) -> None:
        """Go back to ``earlier``; later observations of rows that were given before it are kept."""
        super().load_state_dict(earlier)
        known = earlier["curriculum"]
        # a row is drawn from the front of its pool
        for draw in sorted((d for d in self._pending if d >= self._draw), reverse=True):
            index, _ = self._pending.pop(draw)
            for pool in self._pools.values():
                if index in pool:
                    pool.move_to_end(index, last=False)
            self._last_draw.pop(index, None)
            if str(index) in known["last_draw"]:
                self._last_draw[index] = known["last_draw"][str(index)]
        # a row whose earlier group was observed meanwhile is not the first of its pool
        for pool in self._pools.values():
            for index in sorted(pool, key=lambda i: self._last_draw.get(i, -1)):
                pool.move_to_end(index)
        self._carry = dict(known["carry"])

    def skip_to(self, later: Mapping[str, Any]) -> None:
        """Continue after the rows given until ``later``, a later ``state_dict``; pools and estimates stay.

        Rewards in between are not used: they belong to weights that a rollback discarded. The rows given in
        between go to the end of their pools.
        """
        before = self._draw
        super().load_state_dict(later)
        drawn = later["curriculum"]["last_draw"]
        given = {int(index): draw for index, draw in drawn.items() if draw >= before}
        for index in sorted(given, key=given.__getitem__):
            for pool in self._pools.values():
                if index in pool:
                    pool.move_to_end(index)
        self._last_draw.update(given)
        self._pending, self._missed = {}, {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; pools of other rows, rewards or of another curriculum start anew.

        Of equal rows the one drawn longest ago is still the next of its pool.
        """
        super().load_state_dict(state)
        saved = state.get("curriculum")
        same_rows = (state["length"], state["fingerprint"]) == (len(self._rows), self._fingerprint)
        own = (self._spec.by, self._spec.pools)
        spec = saved.get("spec", {}) if saved else {}
        if saved is None or not same_rows or (spec.get("by"), spec.get("pools")) != own:
            self._start()
            if saved and same_rows:
                last = self._last_draw = {int(index): draw for index, draw in saved["last_draw"].items()}
                for pool in self._pools.values():
                    for index in sorted(last.keys() & pool.keys(), key=last.__getitem__):
                        pool.move_to_end(index)
            logger.warning(
                "the difficulty pools of task %r start anew: rows, rewards or curriculum changed", self._task
            )
            return
        self._pools = {name: OrderedDict.fromkeys(rows) for name, rows in saved["pools"].items()}
        self._estimates = {name: PoolEstimate(**e) for name, e in saved["estimates"].items()}
        self._scale = RewardRange(**saved["scale"])
        self._rates = {int(index): rate for index, rate in saved["rates"].items()}
        self._carry = dict(saved["carry"])
        self._pending = {int(draw): (where[0], where[1]) for draw, where in saved["pending"].items()}
        self._missed = {int(draw): since for draw, since in saved["missed"].items()}
        self._reported = dict(saved["reported"])
        self._last_draw = {int(index): draw for index, draw in saved["last_draw"].items()}
        self._served = {name: PoolEstimate(**e) for name, e in saved["served"].items()}
        self._served_scale = RewardRange(**saved["served_scale"])
        self._unjudged, self._unserved = set(saved["unjudged"]), set(saved["unserved"])
        if self._late_steps:  # a checkpoint leaves late groups out: they come no more
            self._pending, self._missed = {}, {}


def check_curriculum(spec: TaskSpec, rows: Rows) -> None:
    """Check that ``curriculum.by`` of a task can divide its training rows into pools.

    Raises:
        ConfigError: the rows are streamed.
        DataError: see ``pools_by_column``.
    """
    if spec.curriculum.by and isinstance(rows, StreamedRows):
        raise ConfigError(
            f"{spec.where}.curriculum.by={spec.curriculum.by!r} sorts all rows "
            "into pools, and streamed rows are not known beforehand; leave out curriculum or streaming"
        )
    if spec.curriculum.by not in ("", PASS_RATE):
        pools_by_column(rows, spec.curriculum, spec.where)


def pools_by_column(rows: Rows, spec: CurriculumSpec, where: str) -> tuple[list[str], list[int]]:
    """Return the labels of pools by a column, ascending, and the pool of every row.

    There is a pool per value; many numbers make pools of about equal size. A number whose rows alone fill a
    pool begins one.

    Raises:
        DataError: a row lacks the column, or it holds more texts than there are pools.
    """
    values: list[Any] = []
    for number, row in enumerate(rows):
        if (value := row.get(spec.by)) is None:
            raise DataError(
                f"{where}.curriculum.by: it is {spec.by!r}, but row {number} has no such column (it has: "
                f"{', '.join(sorted(map(str, row)))}); name a column of every row, or {PASS_RATE!r}"
            )
        values.append(value)
    numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
    keys = values if numeric else [str(v) for v in values]
    counts = Counter(keys)
    distinct = sorted(counts)
    if len(distinct) <= spec.pools:
        numbers = {value: i for i, value in enumerate(distinct)}
        return [f"{spec.by} {v}" for v in distinct], [numbers[k] for k in keys]
    if not numeric:
        raise DataError(
            f"{where}.curriculum.by: the column {spec.by!r} holds {len(distinct)} different texts, "
            f"more than curriculum.pools = {spec.pools}; raise it, or name a column of numbers"
        )
    starts, before = [distinct[0]], 0
    for value in distinct:
        is_full = before >= len(keys) * len(starts) / spec.pools
        # else the rows before the value would share its pool: all rows, if it is the last value
        fills_one = before > 0 and counts[value] >= len(keys) / spec.pools and len(starts) < spec.pools
        if is_full or fills_one:
            starts.append(value)
        before += counts[value]
    return [f"{spec.by} from {s}" for s in starts], [bisect.bisect_right(starts, k) - 1 for k in keys]
