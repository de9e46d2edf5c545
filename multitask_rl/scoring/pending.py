"""Rollouts that are being scored or judged: added as their generation ends, collected later."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from multitask_rl.records import Rollout
from multitask_rl.scoring.items import Item
from multitask_rl.scoring.lane import Lane
from multitask_rl.scoring.round import Round

__all__ = ["Answering", "Deferred", "Pending", "Span"]

logger = logging.getLogger(__name__)

TICK_S = 0.05
HEARTBEAT_S = 10.0
POLL_S = 0.01

T = TypeVar("T")

Span = tuple[float, float]
"""Start and end, ``time.monotonic()``."""


class Pending(Protocol[T]):
    """Results that are not collected yet. A rollout is identified by its index in order of adding."""

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts; scoring starts where possible."""
        ...

    def seal(self, order: Sequence[int] | None = None) -> None:
        """Declare that no more rollouts are added.

        Args:
            order: all indices in the order of the step's batch; default: as they were added.
        """
        ...

    def is_done(self, index: int) -> bool:
        """Whether everything about a rollout is known."""
        ...

    def known(self, index: int) -> Mapping[str, Any] | None:
        """Return the answers about a rollout by name, if all are there, without collecting them."""
        ...

    def wait(self, is_enough: Callable[[], bool] | None = None) -> str:
        """Return when everything is known, or ``is_enough()``: the task waited for last, if any."""
        ...

    def results(self, indices: Sequence[int]) -> list[T]:
        """Return the results of ``indices``, which must be done; each index is collected once.

        Raises:
            RewardError: a task's error budget is spent.
        """
        ...

    def spans(self, indices: Sequence[int]) -> dict[str, Span]:
        """Return per task from the first question's beginning to the last answer, or until now."""
        ...

    def cancel(self, indices: Sequence[int]) -> None:
        """Cancel all calls that have not started; their results will not be collected."""
        ...


class Answering(Generic[T]):
    """A ``Pending`` of the reward pool.

    Args:
        asking: the questions; used under ``lock``.
        lock: the pool's.
        collect: turns answered indices of ``asking`` into results.
    """

    def __init__(
        self, asking: Round, lock: threading.Lock, collect: Callable[[Round, Sequence[int]], list[T]]
    ) -> None:
        self._asking, self._lock, self._collect = asking, lock, collect

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """See ``Pending``."""
        with self._lock:
            begun = self._asking.add(rollouts)
        _submit(begun)

    def seal(self, order: Sequence[int] | None = None) -> None:
        """See ``Pending``."""
        _submit(self._asking.seal(order))

    def is_done(self, index: int) -> bool:
        """See ``Pending``."""
        return self._asking.is_done(index)

    def known(self, index: int) -> Mapping[str, Any] | None:
        """See ``Pending``."""
        return self._asking.known(index)

    def wait(self, is_enough: Callable[[], bool] | None = None) -> str:
        """See ``Pending``; every 10 s the log says for whom."""
        began = time.monotonic()
        said = HEARTBEAT_S
        had_to_wait = False
        while not (is_enough is not None and is_enough()) and not self._asking.latch.wait(
            TICK_S if is_enough is None else POLL_S
        ):
            had_to_wait = True
            for lane in self._asking.lanes:
                if lane.error is not None:
                    raise lane.error
            if time.monotonic() - began >= said:
                said += HEARTBEAT_S
                _say_who_is_waited_for(self._asking.lanes)
        if not had_to_wait and time.monotonic() - began < POLL_S:
            return ""
        answered = [item for own in self._asking.asked for _, item in own if item.result is not None]
        return max(answered, key=lambda item: item.ended).rollout.task if answered else ""

    def results(self, indices: Sequence[int]) -> list[T]:
        """See ``Pending``."""
        return self._collect(self._asking, indices)

    def spans(self, indices: Sequence[int]) -> dict[str, Span]:
        """See ``Pending``."""
        found: dict[str, Span] = {}
        now = time.monotonic()
        for index in indices:
            for _, item in self._asking.asked[index]:
                if item.began:
                    low, high = found.get(item.rollout.task, (math.inf, 0.0))
                    found[item.rollout.task] = (min(low, item.began), max(high, item.ended or now))
        return found

    def cancel(self, indices: Sequence[int]) -> None:
        """See ``Pending``."""
        gone = set(indices)
        asked = self._asking.asked
        wanted = {id(item) for i, own in enumerate(asked) if i not in gone for _, item in own}
        unwanted: dict[Lane, list[Item]] = {}
        for judge, item in (pair for index in gone for pair in asked[index]):
            if item.result is None and id(item) not in wanted:
                unwanted.setdefault(judge.lane, []).append(item)
        for lane, items in unwanted.items():
            lane.cancel(items)


class Deferred(Generic[T]):
    """A ``Pending`` over one call for all rollouts, which starts when the last rollout is added.

    Args:
        call: one result per rollout, in order.
        background: where the call runs; None = in the thread that asks for the results.
    """

    def __init__(
        self, call: Callable[[Sequence[Rollout]], list[T]], background: ThreadPoolExecutor | None = None
    ) -> None:
        self._call, self._background = call, background
        self._rollouts: list[Rollout] = []
        self._order: list[int] = []
        self._future: Future[list[T]] = Future()
        self._span = (0.0, 0.0)
        self.began = 0.0
        """When the first question was asked, where that is before the call."""

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """See ``Pending``."""
        self._rollouts.extend(rollouts)

    def seal(self, order: Sequence[int] | None = None) -> None:
        """See ``Pending``."""
        self._order = list(range(len(self._rollouts)) if order is None else order)
        if self._background is None:
            self._run()
        else:
            self._background.submit(self._run)

    def _run(self) -> None:
        began = self.began or time.monotonic()
        try:
            answers = self._call([self._rollouts[i] for i in self._order])
            self._span = (began, time.monotonic())
            by_index = dict(zip(self._order, answers, strict=True))
            self._future.set_result([by_index[i] for i in range(len(by_index))])
        except BaseException as error:  # noqa: BLE001 - raised where the results are asked for
            self._future.set_exception(error)

    def is_done(self, index: int) -> bool:
        """See ``Pending``."""
        return self._future.done()

    def known(self, index: int) -> Mapping[str, Any] | None:
        """Return None: everything is known at once, when it is collected."""
        return None

    def wait(self, is_enough: Callable[[], bool] | None = None) -> str:
        """See ``Pending``."""
        if self._future.done():
            return ""
        while not self._future.done() and not (is_enough is not None and is_enough()):
            threading.Event().wait(POLL_S)
        return self._rollouts[0].task if self._rollouts else ""

    def results(self, indices: Sequence[int]) -> list[T]:
        """See ``Pending``."""
        answers = self._future.result()
        return [answers[i] for i in indices]

    def spans(self, indices: Sequence[int]) -> dict[str, Span]:
        """See ``Pending``: one span for all, a call of several tasks cannot be told apart."""
        return {self._rollouts[i].task: self._span for i in indices} if self._span[1] else {}

    def cancel(self, indices: Sequence[int]) -> None:
        """Do nothing: the call is under way."""


def _submit(begun: dict[Lane, list[Item]]) -> None:
    for lane, items in begun.items():
        lane.submit(items)


def _say_who_is_waited_for(lanes: set[Lane]) -> None:
    for lane in lanes:
        if (oldest := lane.oldest()) is not None:
            seconds, item = oldest
            logger.warning(
                "waiting for %s, sample %s[%d], %.0f s",
                item.label,
                item.rollout.prompt.prompt_id,
                item.rollout.sample,
                seconds,
            )
