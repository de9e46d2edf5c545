"""Rounds of questions that are open in several pools: rollouts go to an actor as soon as they are there."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

from multitask_rl.executor.group import ActorGroup
from multitask_rl.records import Rollout, Scored
from multitask_rl.scoring.pending import Deferred, Pending

__all__ = ["Dealt", "Rounds"]

T = TypeVar("T")

_NUMBERS = itertools.count()


class Rounds:
    """A reward pool in its actor, with the rounds that are open."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self._lock = Lock()
        self._rounds: dict[int, tuple[Pending[Any], list[int]]] = {}

    def add_to_round(
        self, number: int, kind: str, rollouts: Sequence[Rollout], places: Sequence[int]
    ) -> None:
        """Begin what can be begun; calls may overtake each other, so each says which places it brings."""
        with self._lock:
            if number not in self._rounds:
                begin = {"scoring": self.pool.begin_scoring, "judging": self.pool.begin_judging}[kind]
                self._rounds[number] = begin(), []
            pending, known = self._rounds[number]
            pending.add(rollouts)
            known.extend(places)

    def finish_round(self, number: int, order: Sequence[int]) -> list[Any] | None:
        """Return the answers about the places in ``order``; None if this actor was not given all of them."""
        with self._lock:
            pending, known = self._rounds.pop(number, (None, []))
        if pending is None or sorted(known) != sorted(order):
            return None
        index = {place: i for i, place in enumerate(known)}
        indices = [index[place] for place in order]
        pending.seal(indices)
        pending.wait()
        return pending.results(indices)


class Dealt(Deferred[T]):
    """A ``Pending`` whose rollouts are dealt out when they are added; the answers come together.

    Args:
        group: actors that hold ``Rounds``.
        kind: ``scoring`` or ``judging``.
        again: asks all actors about rollouts at once; for what a dead one took with it.
        background: where the answers are waited for.
    """

    def __init__(
        self,
        group: ActorGroup,
        kind: str,
        again: Callable[[Sequence[Rollout]], list[T]],
        background: ThreadPoolExecutor,
    ) -> None:
        super().__init__(self._collect, background)
        self._group, self._kind, self._again = group, kind, again
        self._number = next(_NUMBERS)
        self._places: list[list[int]] = [[] for _ in range(len(group))]
        """By pool: indices of its rollouts."""
        self._sent: dict[Any, int] = {}

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """See ``Pending``."""
        self.began = self.began or time.monotonic()
        first = len(self._rollouts)
        super().add(rollouts)
        new: dict[int, list[int]] = {}
        for index, rollout in enumerate(rollouts, first):
            # by its place in the batch, not by when it came: rewards that judge in batches see the same again
            new.setdefault((rollout.prompt.position + rollout.sample) % len(self._group), []).append(index)
        for pool, own in new.items():
            self._places[pool] += own
            given = [self._rollouts[index] for index in own]
            sent = self._group.submit(pool, "add_to_round", self._number, self._kind, given, own)
            self._sent[sent] = pool

    def _collect(self, rollouts: Sequence[Rollout]) -> list[T]:
        """Return the answers about ``rollouts``, which are in the sealed order."""
        while self._sent:
            del self._sent[self._group.first(self._sent)[0]]
        rank = {index: place for place, index in enumerate(self._order)}
        orders = {pool: sorted(own, key=rank.__getitem__) for pool, own in enumerate(self._places) if own}
        work = {pool: (self._number, order) for pool, order in orders.items()}
        answered, _ = self._group.call("finish_round", work)
        found: dict[int, T] = {}
        for pool, answers in answered.items():
            if answers is not None:
                found.update(zip(orders[pool], answers, strict=True))
        lost = [index for index in self._order if index not in found]
        if lost:
            found.update(zip(lost, self._again([self._rollouts[i] for i in lost]), strict=True))
        for index, answer in found.items():
            if isinstance(answer, Scored):
                answer.rollout = self._rollouts[index]  # not the copy that travelled
        return [found[index] for index in self._order]
