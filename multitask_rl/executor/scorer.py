"""Reward pools as Ray actors behind the interface of the local one.

A rollout goes to a pool when it is complete, by its place in the batch, so that rewards see the same batches
again. A pool that dies is started again and its share is repeated; if it dies again in that call, the run
ends.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Any, Generic, TypeVar

from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import EngineError
from multitask_rl.executor.group import ActorCall, ActorGroup
from multitask_rl.records import Event, Failure, Rollout, Scored, Verdict
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.scoring.round import POLL_S, Pending
from multitask_rl.scoring.stats import TaskCounts
from multitask_rl.tracking.timeline import Span

_CALLS = 4
"""Calls that one pool answers at the same time: its metrics can be read while it scores."""
_ROUND_NUMBERS = itertools.count()
_CLOSED = "the Ray reward pools are closed"

T = TypeVar("T")


class _PoolActor:
    """A reward pool in its actor, with the rounds that are open."""

    def __init__(self, pool: RewardPool) -> None:
        self.pool = pool
        self._lock = Lock()
        self._rounds: dict[int, tuple[Pending[Any], list[int]]] = {}
        """By number: the round and the places of its rollouts in the order of adding."""

    def add_to_round(
        self, number: int, kind: str, rollouts: Sequence[Rollout], places: Sequence[int]
    ) -> None:
        """Add ``rollouts`` to a round; calls may overtake each other, so each names its ``places``."""
        with self._lock:
            if number not in self._rounds:
                begin = self.pool.begin_scoring if kind == "scoring" else self.pool.begin_judging
                self._rounds[number] = (begin(), [])
            pending, known = self._rounds[number]
            pending.add(rollouts)
            known.extend(places)

    def finish_round(self, number: int, order: Sequence[int]) -> list[Any] | None:
        """Return the answers for the places in ``order``; None if this actor did not get all of them."""
        with self._lock:
            pending, known = self._rounds.pop(number, (None, []))
        if pending is None or sorted(known) != sorted(order):
            return None
        index = {place: i for i, place in enumerate(known)}
        indices = [index[place] for place in order]
        pending.seal(indices)
        pending.wait()
        return pending.results(indices)


class DealtRound(Generic[T]):
    """A ``Pending`` that deals its rollouts out when they are added; the answers come together.

    ``again`` scores the rollouts of an actor that died once more, on all actors. The answers are waited for
    in ``background``. ``actors`` returns the pools; it raises an EngineError once they are closed.
    """

    def __init__(
        self,
        actors: Callable[[], ActorGroup],
        kind: str,
        again: Callable[[Sequence[Rollout]], list[T]],
        background: ThreadPoolExecutor,
    ) -> None:
        self._actors, self._group = actors, actors()
        self._kind, self._again, self._background = kind, again, background
        self._rollouts: list[Rollout] = []
        self._order: list[int] = []
        self._answers: Future[dict[int, T]] = Future()
        """Index of a rollout -> answer; done once all are there."""
        self._began = self._ended = 0.0
        self._number = next(_ROUND_NUMBERS)
        self._places: list[list[int]] = [[] for _ in range(len(self._group))]
        """[pools] indices of the rollouts that a pool scores."""
        self._sent: dict[Any, ActorCall] = {}

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """See ``Pending``."""
        self._began = self._began or time.monotonic()
        first = len(self._rollouts)
        self._rollouts.extend(rollouts)
        new: dict[int, list[int]] = {}
        for index, rollout in enumerate(rollouts, first):
            # by place in the batch, not by time: rewards that judge in batches see the same batches again
            new.setdefault((rollout.prompt.position + rollout.sample) % len(self._group), []).append(index)
        for pool, own in new.items():
            self._places[pool] += own
            given = [self._rollouts[index] for index in own]
            sent = self._group.submit(pool, "add_to_round", self._number, self._kind, given, own)
            self._sent[sent] = ActorCall(pool, "add_to_round")

    def seal(self, order: Sequence[int] | None = None) -> None:
        """See ``Pending``."""
        self._order = list(range(len(self._rollouts)) if order is None else order)
        self._background.submit(self._collect).add_done_callback(self._fail_cancelled)

    def _fail_cancelled(self, collecting: Future[None]) -> None:
        if collecting.cancelled():
            self._answers.set_exception(EngineError(_CLOSED))

    def _collect(self) -> None:
        try:
            while self._sent:
                self._group.first(self._sent)
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
            self._actors()  # pools that are closed before they have scored all answer with failures
            self._ended = time.monotonic()
            self._answers.set_result(found)
        except BaseException as error:  # noqa: BLE001 - raised where the results are asked for
            self._answers.set_exception(error)

    def is_done(self, index: int) -> bool:
        """See ``Pending``."""
        return self._answers.done()

    def known(self, index: int) -> Mapping[str, Any] | None:
        """Return None: no answer is known before all are."""
        return None

    def wait(self, is_enough: Callable[[], bool] | None = None) -> str:
        """See ``Pending``."""
        if self._answers.done():
            return ""
        while not self._answers.done() and not (is_enough is not None and is_enough()):
            wait([self._answers], POLL_S)
        return self._rollouts[0].task if self._rollouts else ""

    def results(self, indices: Sequence[int]) -> list[T]:
        """See ``Pending``."""
        answers = self._answers.result()
        return [answers[i] for i in indices]

    def spans(self, indices: Sequence[int]) -> dict[str, Span]:
        """See ``Pending``; all tasks have one span."""
        span = (self._began, self._ended)
        return {self._rollouts[i].task: span for i in indices} if self._ended else {}

    def cancel(self, indices: Sequence[int]) -> None:
        """Do nothing: the pools answer all together."""


class RayScorer:
    """Reward pools in Ray actors; rollouts are dealt out in turn.

    Each pool watches the error budget of its own share. A restarted pool continues from the last known state.
    ``make`` builds the pool of actor ``index``, not started.

    Raises:
        MissingExtraError: Ray is not installed.
    """

    def __init__(self, make: Callable[[int], RewardPool], *, num_pools: int) -> None:
        self._group: ActorGroup | None = ActorGroup(
            "reward pool",
            lambda index: _PoolActor(make(index)),
            num_pools,
            num_cpus=1.0,
            num_gpus=0.0,
            max_concurrency=_CALLS,
        )
        self._background = ThreadPoolExecutor(1, thread_name_prefix="ray-scorer")
        self._reviving = Lock()
        self._births = [0] * num_pools
        self._state: dict[str, Any] = {}

    def _actors(self) -> ActorGroup:
        """Return the pools, dead or alive; ``EngineError`` once they are closed."""
        if self._group is None:
            raise EngineError(_CLOSED)
        return self._group

    def _ask(self, method: str, work: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call ``method`` on the pools in ``work``; restart those that died and ask them once more."""
        group, births = self._actors(), list(self._births)
        results, dead = group.call(f"pool.{method}", work)
        if dead:
            begin: list[tuple[str, tuple[Any, ...]]] = [("pool.start", ())] if method != "start" else []
            begin += [("pool.load_state_dict", (self._state,))] if begin and self._state else []
            with self._reviving:
                for index in dead:
                    if self._births[index] == births[index]:  # else another thread was first
                        self._births[index] += 1
                        group.replace(index, begin)
            again, still_dead = group.call(f"pool.{method}", {index: work[index] for index in dead})
            if still_dead:
                raise EngineError(
                    f"reward pool {still_dead[0]} died, was started again and died again ({method}): "
                    f"{group.causes[still_dead[0]]}"
                )
            results.update(again)
        return results

    def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        results = self._ask(method, dict.fromkeys(range(len(self._actors())), arguments))
        return [results[index] for index in sorted(results)]

    def start(self) -> None:
        """Build the plugins in every pool."""
        self._ask_all("start")

    def reward_traits(self) -> dict[str, dict[str, PluginTraits]]:
        """Return the traits of the first pool; all pools have the same."""
        return dict(self._ask_all("reward_traits")[0])

    def _deal(self, method: str, *columns: Sequence[Any]) -> list[Any]:
        """Call ``method`` with each pool's share of the ``columns``, rollouts first."""
        size = len(self._actors())
        work = {
            index: tuple(list(column[index::size]) for column in columns)
            for index in range(min(size, len(columns[0])))
        }
        dealt: list[Any] = [None] * len(columns[0])
        for index, share in self._ask(method, work).items():
            dealt[index::size] = share
        return dealt

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """Return one record per rollout, in order, around the same objects."""
        scored: list[Scored] = self._deal("score", rollouts)
        for record, rollout in zip(scored, rollouts, strict=True):
            record.rollout = rollout
        return scored

    def judge(
        self, rollouts: Sequence[Rollout], only: Sequence[Collection[str]] | None = None
    ) -> list[dict[str, Verdict | Failure]]:
        """Return the verdicts per rollout, in order (see ``RewardPool.judge``)."""
        return self._deal("judge", rollouts) if only is None else self._deal("judge", rollouts, only)

    def explain(self, rollouts: Sequence[Rollout]) -> list[dict[str, str]]:
        """Return the explanations per rollout, in order (see ``RewardPool.explain``)."""
        return self._deal("explain", rollouts)

    def begin_scoring(self) -> Pending[Scored]:
        """Return an open round of rewards."""
        return DealtRound(self._actors, "scoring", self.score, self._background)

    def begin_judging(self) -> Pending[dict[str, Verdict | Failure]]:
        """Return an open round of constraints."""
        return DealtRound(self._actors, "judging", self.judge, self._background)

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return every task's metrics over all pools (see ``RewardPool.metrics``)."""
        merged: dict[str, TaskCounts] = {}
        for pool in self._ask_all("take_counts"):
            for task, counts in pool.items():
                merged.setdefault(task, TaskCounts()).include(counts)
        return {task: counts.metrics() for task, counts in merged.items() if counts.results}

    def health_events(self, step: int) -> list[Event]:
        """Return the events of all pools."""
        return [event for pool in self._ask_all("health_events", step) for event in pool]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the first pool alive: each sees an equal share, so all see the same rates.

        If all are dead, return the last known state, so that the run can still be saved.
        """
        group = self._actors()
        states, _ = group.call("pool.state_dict", dict.fromkeys(range(len(group)), ()))
        self._state = dict(states[min(states)]) if states else self._state
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give every pool the ``state``."""
        self._state = dict(state)
        self._ask_all("load_state_dict", self._state)

    def close(self) -> None:
        """Stop the pools. Idempotent."""
        group, self._group = self._group, None
        self._background.shutdown(wait=False, cancel_futures=True)
        if group is not None:
            try:
                group.call("pool.close", dict.fromkeys(range(len(group)), ()))
                # a round that is collected ends now: it must not ask a cluster that is stopped
                self._background.shutdown(wait=True)
            finally:  # also after Ctrl-C
                group.close()


RunScorer = RewardPool | RayScorer
"""A reward pool as the trainer uses it: in this process's workers, or in Ray actors."""
