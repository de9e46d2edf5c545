"""One round of scoring: the questions about the rollouts of a batch, asked as the rollouts end."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from multitask_rl.records import Failure, Rollout
from multitask_rl.scoring.items import Item, Latch
from multitask_rl.scoring.lane import Lane
from multitask_rl.scoring.results import Result
from multitask_rl.tracking.timeline import Span

logger = logging.getLogger(__name__)

TICK_S, POLL_S = 0.05, 0.01
HEARTBEAT_S = 10.0
MAX_CACHED = 65536

T = TypeVar("T")


class Pending(Protocol[T]):
    """Results that are not collected yet. A rollout is identified by its index in order of adding."""

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts; scoring starts where possible."""

    def seal(self, order: Sequence[int] | None = None) -> None:
        """Declare that no more rollouts are added; ``order``: all indices in the order of the batch."""

    def is_done(self, index: int) -> bool:
        """Whether everything about a rollout is known."""

    def known(self, index: int) -> Mapping[str, Any] | None:
        """Return the answers about a rollout by name, if all are there, without collecting them."""

    def wait(self, is_enough: Callable[[], bool] | None = None) -> str:
        """Wait until all is known, or ``is_enough()``; return the task of the last result ("": no wait)."""

    def results(self, indices: Sequence[int]) -> list[T]:
        """Return the results of done ``indices``, each once; ``RewardError`` if an error budget is spent."""

    def spans(self, indices: Sequence[int]) -> dict[str, Span]:
        """Return per task the start of its first question and the end of its last answer, or now."""

    def cancel(self, indices: Sequence[int]) -> None:
        """Cancel all calls that have not started; their results will not be collected."""


@dataclass(frozen=True, slots=True)
class TaskPlugin:
    """One reward or constraint of one task."""

    name: str
    weight: float
    """Factor of its value in the task's reward: negative where lower values are better (rewards only)."""
    key: bytes
    """Digest of plugin and configuration."""
    lane: Lane
    overrun: Result | None = None
    """The result of a response that exceeds the plugin's limits; None = a failure."""


class Round(Generic[T]):
    """A ``Pending`` of the reward pool: cached answers, and one item per new question.

    Equal rollouts share an item. A plugin that scores responses one by one gets them at once. One that takes
    batches gets them when the round is sealed, in the order given there, so that its batches (and the last
    bits of a model's scores) do not depend on when a response ended.

    Args:
        plugins: by task.
        cache, lock: the pool's results of deterministic plugins by content, the last used at the end.
        collect: turns answered indices of the round into results.
        only: names of the plugins to ask about each rollout; None = all.
    """

    def __init__(
        self,
        plugins: Mapping[str, Sequence[TaskPlugin]],
        cache: OrderedDict[bytes, Result],
        lock: threading.Lock,
        collect: Callable[[Round[T], Sequence[int]], list[T]],
        only: Sequence[Collection[str]] | None,
    ) -> None:
        self.only = only
        self.rollouts: list[Rollout] = []
        self.hits: list[list[tuple[TaskPlugin, Result]]] = []
        """[rollouts] (plugin, cached result)."""
        self.asked: list[list[tuple[TaskPlugin, Item]]] = []
        """[rollouts] (plugin, item that gets the result)."""
        self._plugins, self._cache, self._lock, self._collect = plugins, cache, lock, collect
        self._latch = Latch()
        self._lanes: set[Lane] = set()
        """Lanes that were asked."""
        self._items: dict[tuple[bytes, str], Item] = {}
        """By the cache's key and the value of an overrun, which depends on the task."""
        self._prompts: dict[int, bytes] = {}
        self._held: dict[int, list[tuple[Lane, Item]]] = {}
        """Index of a rollout -> items for plugins that take batches, held until the round is sealed."""

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """See ``Pending``; a rollout with a failure gets no questions."""
        begun: dict[Lane, list[Item]] = {}
        with self._lock:
            for index, rollout in enumerate(rollouts, len(self.rollouts)):
                self.rollouts.append(rollout)
                self.hits.append([])
                self.asked.append([])
                for plugin in self._plugins[rollout.task] if rollout.failure is None else ():
                    if self.only is not None and plugin.name not in self.only[index]:
                        continue
                    item = self._ask(index, rollout, plugin)
                    if item is not None and plugin.lane.facts.one_by_one:
                        begun.setdefault(plugin.lane, []).append(item)
                    elif item is not None:
                        self._held.setdefault(index, []).append((plugin.lane, item))
        for lane, items in begun.items():
            lane.submit(items)

    def seal(self, order: Sequence[int] | None = None) -> None:
        """See ``Pending``."""
        rest: dict[Lane, list[Item]] = {}
        for index in range(len(self.rollouts)) if order is None else order:
            for lane, item in self._held.pop(index, ()):
                rest.setdefault(lane, []).append(item)
        for lane, items in rest.items():
            lane.submit(items)

    def is_done(self, index: int) -> bool:
        """See ``Pending``."""
        return all(item.result is not None for _, item in self.asked[index])

    def known(self, index: int) -> dict[str, Result] | None:
        """See ``Pending``."""
        found = {plugin.name: result for plugin, result in self.hits[index]}
        for plugin, item in self.asked[index]:
            if item.result is None:
                return None
            found[plugin.name] = item.result
        return found

    def wait(self, is_enough: Callable[[], bool] | None = None) -> str:
        """See ``Pending``; every 10 s the log names the oldest open item of each lane."""
        began = time.monotonic()
        next_report = HEARTBEAT_S
        had_to_wait = False
        while not (is_enough is not None and is_enough()) and not self._latch.wait(
            TICK_S if is_enough is None else POLL_S
        ):
            had_to_wait = True
            for lane in self._lanes:
                if lane.error is not None:
                    raise lane.error
            if time.monotonic() - began < next_report:
                continue
            next_report += HEARTBEAT_S
            for seconds, item in filter(None, (lane.oldest() for lane in self._lanes)):
                sample = f"{item.rollout.prompt.prompt_id}[{item.rollout.sample}]"
                logger.warning("waiting for %s, sample %s, %.0f s", item.label, sample, seconds)
        if not had_to_wait and time.monotonic() - began < POLL_S:
            return ""
        answered = [item for own in self.asked for _, item in own if item.result is not None]
        return max(answered, key=lambda item: item.ended).rollout.task if answered else ""

    def results(self, indices: Sequence[int]) -> list[T]:
        """See ``Pending``."""
        return self._collect(self, indices)

    def spans(self, indices: Sequence[int]) -> dict[str, Span]:
        """See ``Pending``."""
        found: dict[str, Span] = {}
        now = time.monotonic()
        for item in (item for index in indices for _, item in self.asked[index] if item.began):
            low, high = found.get(item.rollout.task, (math.inf, 0.0))
            found[item.rollout.task] = (min(low, item.began), max(high, item.ended or now))
        return found

    def cancel(self, indices: Sequence[int]) -> None:
        """See ``Pending``."""
        gone = set(indices)
        wanted = {id(item) for i, own in enumerate(self.asked) if i not in gone for _, item in own}
        unwanted: dict[Lane, list[Item]] = {}
        for plugin, item in (pair for index in gone for pair in self.asked[index]):
            if item.result is None and id(item) not in wanted:
                unwanted.setdefault(plugin.lane, []).append(item)
        for lane, items in unwanted.items():
            lane.cancel(items)

    def remember(self) -> None:
        """Put new results into the cache, except failures and overruns."""
        for (key, overrun), item in list(self._items.items()):
            if item.result is not None:
                if not isinstance(item.result, Failure) and not item.has_overrun:
                    self._cache[key] = item.result
                    if len(self._cache) > MAX_CACHED:
                        self._cache.popitem(last=False)
                del self._items[key, overrun]

    def _ask(self, index: int, rollout: Rollout, plugin: TaskPlugin) -> Item | None:
        """Note the question; return its item if it is a new one."""
        key, place = b"", (b"", "")
        if plugin.lane.facts.traits.deterministic:
            key = _content_key(plugin.key, rollout, self._prompts)
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                self.hits[index].append((plugin, known))
                return None
            place = (key, repr(plugin.overrun))
            if place in self._items:
                self.asked[index].append((plugin, self._items[place]))
                return None
        item = Item(rollout, self._latch, f"{rollout.task}/{plugin.name}", overrun=plugin.overrun)
        self._latch.expect(1)
        self._lanes.add(plugin.lane)
        if key:
            self._items[place] = item
        self.asked[index].append((plugin, item))
        return item


def _content_key(plugin: bytes, rollout: Rollout, prompts: dict[int, bytes]) -> bytes:
    """Return the cache key of ``rollout`` under ``plugin`` (digest of plugin, version, configuration).

    It covers everything that a deterministic plugin may read, except log-probabilities and verdicts: a plugin
    that reads those declares ``deterministic=False``. ``prompts`` keeps the digests of prompts by ``id``.
    """
    prompt = rollout.prompt
    digest = prompts.get(id(prompt))
    if digest is None:
        row = sorted((str(key), repr(value)) for key, value in prompt.row.items())
        content = repr((prompt.task, prompt.text, row))
        digest = prompts[id(prompt)] = hashlib.blake2b(content.encode(), digest_size=16).digest()
    key = hashlib.blake2b(plugin, digest_size=16)
    key.update(digest)
    key.update(rollout.finish_reason.encode())
    key.update(array("q", rollout.response_ids).tobytes())
    key.update(b"\0")
    key.update(rollout.response.encode(errors="surrogatepass"))
    if rollout.turns:
        key.update(repr((rollout.earned, rollout.turns)).encode(errors="surrogatepass"))
    return key.digest()
