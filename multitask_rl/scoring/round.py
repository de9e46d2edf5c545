"""The questions of one call to the pool: who is asked what, once, and what is known already."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from multitask_rl.records import Failure, Rollout
from multitask_rl.scoring.cache import ResultCache, RowDigests
from multitask_rl.scoring.grader import Result
from multitask_rl.scoring.items import Item, Latch
from multitask_rl.scoring.lane import Lane

__all__ = ["Judge", "Round"]


@dataclass(frozen=True, slots=True)
class Judge:
    """One reward or constraint of one task."""

    name: str
    weight: float
    """Factor of its value in the task's reward (rewards only)."""
    key: bytes
    """Digest of plugin and configuration."""
    lane: Lane


class Round:
    """Every question once: the cache's answers, one item per new question, shared by equal rollouts.

    Args:
        rollouts: those with a failure of their own are not asked about.
        judges: by task.
        cache: of results of deterministic plugins.
        only: names of the judges to ask about each rollout; None = all.
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        judges: Mapping[str, Sequence[Judge]],
        cache: ResultCache,
        only: Sequence[Collection[str]] | None = None,
    ) -> None:
        self.lanes: dict[Lane, list[Item]] = {}
        """New questions by lane."""
        self.hits: list[tuple[int, Judge, Result]] = []
        """Index of the rollout, judge, known result."""
        self.asked: list[tuple[int, Judge, Item]] = []
        """Index of the rollout, judge, the item that will know."""
        self.latch = Latch()
        self._cache = cache
        self._keys: dict[bytes, Item] = {}
        digests = RowDigests()
        for index, rollout in enumerate(rollouts):
            if rollout.failure is None:
                for judge in judges[rollout.task]:
                    if only is None or judge.name in only[index]:
                        self._ask(index, rollout, judge, digests)
        self.latch.expect(sum(map(len, self.lanes.values())))

    def remember(self) -> None:
        """Put what was found out into the cache; failures are not kept."""
        for key, item in self._keys.items():
            if item.result is not None and not isinstance(item.result, Failure):
                self._cache.put(key, item.result)

    def _ask(self, index: int, rollout: Rollout, judge: Judge, digests: RowDigests) -> None:
        item = None
        if judge.lane.traits.deterministic:
            key = digests.key(judge.key, rollout)
            known = self._cache.get(key)
            if known is not None:
                self.hits.append((index, judge, known))
                return
            item = self._keys.get(key)
        if item is None:
            item = Item(rollout, self.latch, f"{rollout.task}/{judge.name}")
            self.lanes.setdefault(judge.lane, []).append(item)
            if judge.lane.traits.deterministic:
                self._keys[key] = item
        self.asked.append((index, judge, item))
