"""Rollouts whose results are collected later: ``Pending``, and the form with one call for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, Protocol, TypeVar

from multitask_rl.records import Rollout
from multitask_rl.tracking.timeline import Span

POLL_S = 0.01

T = TypeVar("T")


class Pending(Protocol[T]):
    """Results that are not collected yet. A rollout is identified by its index in order of adding."""

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts; scoring starts where possible."""

    def seal(self, order: Sequence[int] | None = None) -> None:
        """Declare that no more rollouts are added; ``order``: all indices as the step's batch has them."""

    def is_done(self, index: int) -> bool:
        """Whether everything about a rollout is known."""

    def known(self, index: int) -> Mapping[str, Any] | None:
        """Return the answers about a rollout by name, if all are there, without collecting them."""

    def wait(self, is_enough: Callable[[], bool] | None = None) -> str:
        """Wait until all is known, or ``is_enough()``; return the task of the last result ("": no wait)."""

    def results(self, indices: Sequence[int]) -> list[T]:
        """Return the results of ``indices``, which are done; ``RewardError`` if an error budget is spent.

        Each index is collected once.
        """

    def spans(self, indices: Sequence[int]) -> dict[str, Span]:
        """Return per task the start of its first question and the end of its last answer, or now."""

    def cancel(self, indices: Sequence[int]) -> None:
        """Cancel all calls that have not started; their results will not be collected."""


class Deferred(Generic[T]):
    """A ``Pending`` over one call for all rollouts, which starts when the last rollout is added.

    Args:
        call: one result per rollout, in order.
        background: where the call runs; None = in the thread that seals.
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
        """``time.monotonic()`` of the first question, where that is before the call."""

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
        """Return None: no answer is known before all are."""
        return None

    def wait(self, is_enough: Callable[[], bool] | None = None) -> str:
        """See ``Pending``."""
        if self._future.done():
            return ""
        while not self._future.done() and not (is_enough is not None and is_enough()):
            wait([self._future], POLL_S)
        return self._rollouts[0].task if self._rollouts else ""

    def results(self, indices: Sequence[int]) -> list[T]:
        """See ``Pending``."""
        answers = self._future.result()
        return [answers[i] for i in indices]

    def spans(self, indices: Sequence[int]) -> dict[str, Span]:
        """See ``Pending``; all tasks of the call have one span."""
        return {self._rollouts[i].task: self._span for i in indices} if self._span[1] else {}

    def cancel(self, indices: Sequence[int]) -> None:
        """Do nothing: the call cannot be divided."""
