"""One round of scoring: the items of one step, with cached results and results that are still open."""

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
    overrun: Result | None = None
    """The result of a response that passes the plugin's limits; None = a failure."""


class Round:
    """Every question once: the cache's answers, one item per new question, shared by equal rollouts.

    Rollouts may be added while earlier ones are being scored. A plugin that looks at responses one by one
    gets them at once; one that takes batches gets them when the round is sealed, in the order given there,
    so that its batches (and the last bits of a model's scores) do not depend on when a response ended.

    Args:
        judges: by task.
        cache: of results of deterministic plugins.
        only: names of the judges to ask about each rollout; None = all.
    """

    def __init__(
        self,
        judges: Mapping[str, Sequence[Judge]],
        cache: ResultCache,
        only: Sequence[Collection[str]] | None = None,
    ) -> None:
        self._only = only
        self.rollouts: list[Rollout] = []
        self.hits: list[list[tuple[Judge, Result]]] = []
        """Per rollout: judge, result that was known."""
        self.asked: list[list[tuple[Judge, Item]]] = []
        """Per rollout: judge, the item that will know."""
        self.latch = Latch()
        self.lanes: set[Lane] = set()
        """Those that were asked."""
        self._judges = judges
        self._cache = cache
        self._keys: dict[tuple[bytes, str], Item] = {}
        """By the cache's key and what an overrun is worth, which is the task's word and not the plugin's."""
        self._digests = RowDigests()
        self._held: dict[int, list[tuple[Lane, Item]]] = {}

    def add(self, rollouts: Sequence[Rollout]) -> dict[Lane, list[Item]]:
        """Take rollouts (those with a failure are not asked about); return what to submit now."""
        now: dict[Lane, list[Item]] = {}
        for rollout in rollouts:
            index = len(self.rollouts)
            self.rollouts.append(rollout)
            self.hits.append([])
            self.asked.append([])
            if rollout.failure is not None:
                continue
            for judge in self._judges[rollout.task]:
                if self._only is not None and judge.name not in self._only[index]:
                    continue
                item = self._ask(index, rollout, judge)
                if item is not None and judge.lane.one_by_one:
                    now.setdefault(judge.lane, []).append(item)
                elif item is not None:
                    self._held.setdefault(index, []).append((judge.lane, item))
        return now

    def seal(self, order: Sequence[int] | None = None) -> dict[Lane, list[Item]]:
        """Return what was held back for plugins that take batches.

        Args:
            order: indices of all rollouts in the order to hand them on; default: as they were added.
        """
        rest: dict[Lane, list[Item]] = {}
        for index in range(len(self.rollouts)) if order is None else order:
            for lane, item in self._held.pop(index, ()):
                rest.setdefault(lane, []).append(item)
        return rest

    def is_done(self, index: int) -> bool:
        """Whether every question about a rollout is answered."""
        return all(item.result is not None for _, item in self.asked[index])

    def known(self, index: int) -> dict[str, Result] | None:
        """Return the answers about a rollout by name; None while one is open."""
        found = {judge.name: result for judge, result in self.hits[index]}
        for judge, item in self.asked[index]:
            if item.result is None:
                return None
            found[judge.name] = item.result
        return found

    def remember(self) -> None:
        """Put what was found out into the cache; failures and overruns are not kept."""
        for (key, overrun), item in list(self._keys.items()):
            if item.result is not None:
                if not isinstance(item.result, Failure) and not item.has_overrun:
                    self._cache.put(key, item.result)
                del self._keys[key, overrun]

    def _ask(self, index: int, rollout: Rollout, judge: Judge) -> Item | None:
        """Note the question; return the item if it is a new one."""
        item, key = None, b""
        if judge.lane.traits.deterministic:
            key = self._digests.key(judge.key, rollout)
            known = self._cache.get(key)
            if known is not None:
                self.hits[index].append((judge, known))
                return None
            item = self._keys.get((key, repr(judge.overrun)))
        is_new = item is None
        if item is None:
            item = Item(rollout, self.latch, f"{rollout.task}/{judge.name}", overrun=judge.overrun)
            self.latch.expect(1)
            self.lanes.add(judge.lane)
            if key:
                self._keys[key, repr(judge.overrun)] = item
        self.asked[index].append((judge, item))
        return item if is_new else None
