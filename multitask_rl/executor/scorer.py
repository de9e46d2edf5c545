"""Reward pools as Ray actors behind the interface of the local one.

Rewards look at one rollout at a time, so the pool that scores it changes nothing; they begin when a rollout
is there, as in process. A pool that dies is started again once and its share is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import fmean
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import EngineError
from multitask_rl.executor.group import ActorGroup
from multitask_rl.executor.rounds import Dealt, Rounds
from multitask_rl.records import Event, Failure, Rollout, Scored, Verdict
from multitask_rl.scoring.pool import RewardPool

if TYPE_CHECKING:
    from multitask_rl.config.run import ScoringConfig
    from multitask_rl.config.task import TaskSpec
    from multitask_rl.scoring.pending import Pending

__all__ = ["RayScorer", "RunScorer"]

_CALLS = 4
"""Of one pool at once: its numbers can be asked for while it scores."""

T = TypeVar("T")


class RunScorer(Protocol):
    """What the trainer asks of a reward pool."""

    def start(self) -> None:
        """Build the plugins."""
        ...

    def reward_traits(self) -> dict[str, dict[str, PluginTraits]]:
        """Return what the rewards of each task declare, by task and the reward's name."""
        ...

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """Return one record per rollout, in order."""
        ...

    def judge(
        self, rollouts: Sequence[Rollout], only: Sequence[Collection[str]] | None = None
    ) -> list[dict[str, Verdict | Failure]]:
        """Return the verdicts per rollout, in order, of the constraints named in ``only`` (None: all)."""
        ...

    def begin_scoring(self) -> Pending[Scored]:
        """Return an open round of rewards: rollouts are added as they end."""
        ...

    def begin_judging(self) -> Pending[dict[str, Verdict | Failure]]:
        """Return an open round of constraints."""
        ...

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return task -> metric -> value since the last call."""
        ...

    def health_events(self, step: int) -> list[Event]:
        """Return what went wrong since the last call."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it by task, JSON-able."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``, under the present names of the tasks; new tasks start fresh."""
        ...

    def close(self) -> None:
        """Stop the workers. Idempotent."""
        ...


def _make_pool(
    specs: dict[str, TaskSpec], config: ScoringConfig, seed: int, devices: dict[str, str], index: int
) -> RunScorer:
    return RewardPool(specs, config, seed=seed, devices=devices)


def _with_rounds(make: Callable[[int], RunScorer], index: int) -> Rounds:
    return Rounds(make(index))


class RayScorer:
    """A reward pool in each of several Ray actors; rollouts are dealt out in turn.

    Each pool watches the error budget of its own share; one that is started again goes on with the last state
    that is known.

    Args:
        make: builds the pool of actor ``index`` (not started).
        num_pools: how many.
        num_cpus: per pool.
        num_gpus: per pool, for rewards that hold a model.

    Raises:
        MissingExtraError: Ray is not installed.
    """

    def __init__(
        self,
        make: Callable[[int], RunScorer],
        *,
        num_pools: int,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
    ) -> None:
        self._group: ActorGroup | None = ActorGroup(
            "reward pool",
            partial(_with_rounds, make),
            num_pools,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_concurrency=_CALLS,
        )
        self._background = ThreadPoolExecutor(1, thread_name_prefix="ray-scorer")
        self._reviving = Lock()
        self._births = [0] * num_pools
        self._state: dict[str, Any] = {}

    @classmethod
    def build(
        cls,
        specs: Mapping[str, TaskSpec],
        config: ScoringConfig,
        *,
        seed: int,
        devices: Mapping[str, str],
        num_pools: int,
        num_gpus: float = 0.0,
    ) -> RayScorer:
        """Return pools of the ordinary kind (``scoring.pool.RewardPool``, same arguments) in actors."""
        make = partial(_make_pool, dict(specs), config, seed, dict(devices))
        return cls(make, num_pools=num_pools, num_gpus=num_gpus)

    def _open(self) -> ActorGroup:
        if self._group is None:
            raise EngineError("the Ray reward pools are closed")
        return self._group

    def _ask(self, method: str, work: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call ``method`` on pools; those that died are started again and asked once more."""
        group, births = self._open(), list(self._births)
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
                    f"reward pool {still_dead[0]} died, was started again and died again ({method})"
                )
            results.update(again)
        return results

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        results = self._ask(method, dict.fromkeys(range(len(self._open())), arguments))
        return [results[index] for index in sorted(results)]

    def start(self) -> None:
        """Build the plugins in every pool."""
        self._all("start")

    def reward_traits(self) -> dict[str, dict[str, PluginTraits]]:
        """Return what the first pool knows; they all know the same."""
        traits: dict[str, dict[str, PluginTraits]] = self._all("reward_traits")[0]
        return traits

    def _deal(self, method: str, rollouts: Sequence[Rollout], *beside: Sequence[Any]) -> list[Any]:
        """Call ``method`` with each pool's share of the rollouts and of what is given ``beside`` them."""
        size = len(self._open())
        work = {
            index: tuple(list(column[index::size]) for column in (rollouts, *beside))
            for index in range(min(size, len(rollouts)))
        }
        dealt: list[Any] = [None] * len(rollouts)
        for index, share in self._ask(method, work).items():
            dealt[index::size] = share
        return dealt

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """Return one record per rollout, in order, around the very rollouts given."""
        scored: list[Scored] = self._deal("score", rollouts)
        for record, rollout in zip(scored, rollouts, strict=True):
            record.rollout = rollout
        return scored

    def judge(
        self, rollouts: Sequence[Rollout], only: Sequence[Collection[str]] | None = None
    ) -> list[dict[str, Verdict | Failure]]:
        """Return the verdicts per rollout, in order (see ``RewardPool.judge``)."""
        return self._deal("judge", rollouts) if only is None else self._deal("judge", rollouts, only)

    def begin_scoring(self) -> Pending[Scored]:
        """Return a round whose rollouts are dealt out as they are added."""
        return self._begin("scoring", self.score)

    def begin_judging(self) -> Pending[dict[str, Verdict | Failure]]:
        """Return a round whose rollouts are dealt out as they are added."""
        return self._begin("judging", self.judge)

    def _begin(self, kind: str, again: Callable[[Sequence[Rollout]], list[T]]) -> Dealt[T]:
        return Dealt(self._open(), kind, again, self._background)

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the mean over the pools of every task's metrics."""
        merged: dict[str, dict[str, list[float]]] = {}
        for pool in self._all("metrics"):
            for task, metrics in pool.items():
                for name, value in metrics.items():
                    merged.setdefault(task, {}).setdefault(name, []).append(value)
        return {
            task: {name: fmean(values) for name, values in metrics.items()}
            for task, metrics in merged.items()
        }

    def health_events(self, step: int) -> list[Event]:
        """Return the events of all pools."""
        return [event for pool in self._all("health_events", step) for event in pool]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the first pool alive: shares are dealt in turn, so all see the same rates.

        Without one it is the last state known: a run that ends because its pools died is saved too.
        """
        group = self._open()
        states, _ = group.call("pool.state_dict", dict.fromkeys(range(len(group)), ()))
        self._state = dict(states[min(states)]) if states else self._state
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give every pool the ``state``."""
        self._state = dict(state)
        self._all("load_state_dict", self._state)

    def close(self) -> None:
        """Stop the pools."""
        self._background.shutdown(wait=False, cancel_futures=True)
        if self._group is not None:
            self._group.call("pool.close", dict.fromkeys(range(len(self._group)), ()))
            self._group.close()
            self._group = None
