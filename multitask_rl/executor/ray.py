"""Engine replicas and reward pools as Ray actors (extra ``ray``), behind the interfaces of the local ones.

Samples carry their own seeds and rewards look at one rollout at a time, so where a piece of work runs changes
no result. A replica that dies is started again once, with the newest weights, and its share is repeated.
Nothing waits silently: every 30 s the log says for whom.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from multitask_rl.errors import EngineError, MissingExtraError, MultitaskRLError
from multitask_rl.records import Event, Failure, Rollout, Scored, Verdict
from multitask_rl.rollout.base import Generation, GenerationRequest, RolloutEngine

if TYPE_CHECKING:
    from torch import Tensor

    from multitask_rl.config.run import RolloutConfig
    from multitask_rl.training.actor import Actor

__all__ = ["EngineFactory", "RayEngine", "RayEngineFactory", "RayScorer", "Scorer", "connect"]

_LOG = logging.getLogger(__name__)
_REPORT_EVERY_S = 30.0
T = TypeVar("T")


class Scorer(Protocol):
    """What the trainer asks of a reward pool."""

    def start(self) -> None:
        """Build the plugins."""
        ...

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """Return one record per rollout, in order."""
        ...

    def judge(self, rollouts: Sequence[Rollout]) -> list[dict[str, Verdict | Failure]]:
        """Return the constraints' verdicts per rollout, in order."""
        ...

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return task -> metric -> value since the last call."""
        ...

    def health_events(self, step: int) -> list[Event]:
        """Return what went wrong since the last call."""
        ...

    def close(self) -> None:
        """Stop the workers. Idempotent."""
        ...


class EngineFactory(Protocol):
    """An engine class, as the entry points name it."""

    shares_weights: bool

    def build(self, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> RolloutEngine:
        """Return the engine of ``actor``."""
        ...


def connect() -> bool:
    """Join the running cluster (``RAY_ADDRESS``) or start one on this machine; True if this call did.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise MissingExtraError(
            "executor=ray needs Ray, which is not installed: pip install 'multitask-rl[ray]', or take "
            "executor=local."
        )
    import ray

    if ray.is_initialized():
        return False
    ray.init(
        address=os.environ.get("RAY_ADDRESS"),
        include_dashboard=False if "RAY_ADDRESS" not in os.environ else None,
        logging_level=logging.WARNING,
        log_to_driver=False,
    )
    return True


class _Cluster:
    """The connection that all groups of this process share."""

    def __init__(self) -> None:
        self._num_users = 0
        self._is_ours = False

    def enter(self) -> None:
        if self._num_users == 0:
            self._is_ours = connect()
        self._num_users += 1

    def leave(self) -> None:
        self._num_users -= 1
        if self._num_users == 0 and self._is_ours:
            import ray

            ray.shutdown()


_CLUSTER = _Cluster()


class _Host:
    """The Ray actor: holds one object and calls its methods."""

    def __init__(self, make: Callable[[int], Any], index: int) -> None:
        self._object = make(index)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._object, method)(*arguments)


class _Group(Generic[T]):
    """``size`` actors that each hold an object made by ``make(index)``."""

    def __init__(
        self, name: str, make: Callable[[int], Any], size: int, *, num_cpus: float, num_gpus: float
    ) -> None:
        _CLUSTER.enter()
        import ray

        self.name = name
        self._make = make
        self._host = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus)(_Host)
        self._actors = [self._host.remote(make, index) for index in range(size)]

    def __len__(self) -> int:
        return len(self._actors)

    def replace(self, index: int) -> None:
        """Start the actor ``index`` afresh."""
        import ray

        ray.kill(self._actors[index])
        self._actors[index] = self._host.remote(self._make, index)

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> tuple[dict[int, Any], list[int]]:
        """Call ``method`` on the named actors at once; return the results and who died.

        Raises:
            MultitaskRLError: what the method raised, with its type.
        """
        import ray

        refs = {self._actors[index].call.remote(method, *args): index for index, args in arguments.items()}
        results: dict[int, Any] = {}
        dead: list[int] = []
        pending, began = list(refs), time.monotonic()
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=_REPORT_EVERY_S)
            for ref in done:
                try:
                    results[refs[ref]] = ray.get(ref)
                except ray.exceptions.RayActorError as error:
                    _LOG.warning("%s %d died: %s", self.name, refs[ref], error)
                    dead.append(refs[ref])
                except ray.exceptions.RayTaskError as error:
                    raise _original(error) from error
            if pending:
                waiting = ", ".join(str(refs[ref]) for ref in pending)
                seconds = time.monotonic() - began
                _LOG.warning("waiting for %s %s in %s for %.0f s", self.name, waiting, method, seconds)
        return results, sorted(dead)

    def close(self) -> None:
        """Kill the actors; the last group also stops a cluster that was started here."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        _CLUSTER.leave()


def _original(error: Any) -> MultitaskRLError:
    """Return the error as its own type where it is one of ours."""
    cause = error.cause
    if isinstance(cause, MultitaskRLError):
        # Ray hands back a subclass of its own making; the first class of ours is the one that was raised
        for own in type(cause).__mro__:
            if own.__module__ == MultitaskRLError.__module__ and issubclass(own, MultitaskRLError):
                return own(str(cause))
    return EngineError(f"a Ray actor failed: {type(cause).__name__}: {cause}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RayEngineFactory:
    """Stands where the engine class stands: ``build`` returns ``num_replicas`` of it behind one engine."""

    engine: EngineFactory
    num_replicas: int
    num_cpus: float = 1.0
    """Per replica, and the threads torch uses in it."""
    num_gpus: float = 0.0
    """Per replica."""
    shares_weights: bool = False

    def build(self, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> RayEngine:
        """Write the actor to ``<output_dir>/ray_start`` and start the replicas from there."""
        from multitask_rl.rollout.handover import save_for_engine

        directory = (output_dir / "ray_start").resolve()
        save_for_engine(actor, directory)
        make = partial(
            _make_replica,
            self.engine,
            str(directory),
            actor.tokenizer,
            config,
            seed,
            "cuda" if self.num_gpus else "cpu",
        )
        engine = RayEngine(
            make, num_replicas=self.num_replicas, num_cpus=self.num_cpus, num_gpus=self.num_gpus
        )
        engine.update_weights(actor.state_dict(), actor.policy_version)
        return engine


class _Replica:
    """An engine in a process of its own, with the copy of the actor it was built from."""

    def __init__(self, engine: RolloutEngine, actor: Actor) -> None:
        self._engine = engine
        # an engine that samples from the actor's own tensors follows the copy; another needs it no more
        self._model: Any = actor.model if engine.shares_weights else None

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        return self._engine.generate(requests)

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        if self._model is None:
            self._engine.update_weights(weights, policy_version)
            return
        import torch

        own = self._model.state_dict()
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)
        self._engine.update_weights({}, policy_version)


def _make_replica(
    engine: EngineFactory,
    directory: str,
    tokenizer: Any,
    config: RolloutConfig,
    seed: int,
    device: str,
    index: int,
) -> _Replica:
    from transformers import AutoModelForCausalLM

    from multitask_rl.config.run import ModelConfig
    from multitask_rl.training.actor import Actor

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", attn_implementation="sdpa")
    model.to(device).eval()
    actor = Actor(model, tokenizer, ModelConfig(name_or_path=directory))
    output_dir = Path(directory) / f"replica-{index}"
    return _Replica(engine.build(actor, config, seed=seed, output_dir=output_dir), actor)


class RayEngine:
    """``RolloutEngine`` over replicas in Ray actors.

    Args:
        make: builds replica ``index`` in its actor; anything with ``generate`` and ``update_weights``.
        num_replicas: how many.
        num_cpus: per replica.
        num_gpus: per replica.

    Raises:
        MissingExtraError: Ray is not installed.
    """

    shares_weights = False

    def __init__(
        self, make: Callable[[int], Any], *, num_replicas: int, num_cpus: float = 1.0, num_gpus: float = 0.0
    ) -> None:
        self.policy_version = 0
        self._weights: Any = None
        self._group: _Group[Any] | None = _Group(
            "rollout replica", make, num_replicas, num_cpus=num_cpus, num_gpus=num_gpus
        )

    def _open(self) -> _Group[Any]:
        if self._group is None:
            raise EngineError("the Ray engine is closed")
        return self._group

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """Return ``len(seeds)`` generations per request (see ``RolloutEngine``)."""
        group = self._open()
        shares = _share_out([_cost(request) for request in requests], len(group))
        work = {index: ([requests[i] for i in share],) for index, share in enumerate(shares) if share}
        results, dead = group.call("generate", work)
        if dead:
            self._revive(group, dead)
            again, still_dead = group.call("generate", {index: work[index] for index in dead})
            if still_dead:
                raise EngineError(f"rollout replica {still_dead[0]} died twice on the same requests")
            results.update(again)
        ordered: list[list[Generation]] = [[] for _ in requests]
        for index, generations in results.items():
            for position, group_of_request in zip(shares[index], generations, strict=True):
                ordered[position] = group_of_request
        return ordered

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Send ``weights`` to every replica through the object store, once."""
        import ray

        group = self._open()
        self._weights = ray.put({name: tensor.detach().cpu() for name, tensor in weights.items()})
        self.policy_version = policy_version
        arguments = (self._weights, policy_version)
        _, dead = group.call("update_weights", dict.fromkeys(range(len(group)), arguments))
        if dead:
            self._revive(group, dead)

    def _revive(self, group: _Group[Any], dead: Sequence[int]) -> None:
        for index in dead:
            group.replace(index)
        if self._weights is None:
            return
        arguments = (self._weights, self.policy_version)
        _, still_dead = group.call("update_weights", dict.fromkeys(dead, arguments))
        if still_dead:
            raise EngineError(f"rollout replica {still_dead[0]} died, was started again and died again")

    def close(self) -> None:
        """Stop the replicas."""
        if self._group is not None:
            self._group.close()
            self._group = None


def _cost(request: GenerationRequest) -> int:
    """Return the tokens a request may take."""
    return len(request.seeds) * (len(request.prompt_ids) + request.sampling.max_new_tokens)


def _share_out(costs: Sequence[int], number: int) -> list[list[int]]:
    """Return ``number`` lists of positions of about equal cost: the dearest first, each to the least loaded.

    >>> _share_out([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(number)]
    loads = [0] * number
    for position in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        index = loads.index(min(loads))
        shares[index].append(position)
        loads[index] += costs[position]
    return [sorted(share) for share in shares]


class RayScorer:
    """A reward pool in each of several Ray actors; rollouts are dealt out in turn.

    Each pool watches the error budget of its own share.

    Args:
        make: builds the pool of actor ``index`` (not started).
        num_pools: how many.
        num_cpus: per pool.
        num_gpus: per pool, for rewards that hold a model.

    Raises:
        MissingExtraError: Ray is not installed.
    """

    def __init__(
        self, make: Callable[[int], Scorer], *, num_pools: int, num_cpus: float = 1.0, num_gpus: float = 0.0
    ) -> None:
        self._group: _Group[Scorer] | None = _Group(
            "reward pool", make, num_pools, num_cpus=num_cpus, num_gpus=num_gpus
        )

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        if self._group is None:
            raise EngineError("the Ray reward pools are closed")
        results, dead = self._group.call(method, dict.fromkeys(range(len(self._group)), arguments))
        self._revive(dead)
        return [results[index] for index in sorted(results)]

    def _revive(self, dead: Sequence[int]) -> None:
        if not dead or self._group is None:
            return
        for index in dead:
            self._group.replace(index)
        _, still_dead = self._group.call("start", dict.fromkeys(dead, ()))
        if still_dead:
            raise EngineError(f"reward pool {still_dead[0]} died, was started again and died again")

    def start(self) -> None:
        """Build the plugins in every pool."""
        self._all("start")

    def _deal(self, method: str, rollouts: Sequence[Rollout]) -> list[Any]:
        if self._group is None:
            raise EngineError("the Ray reward pools are closed")
        size = len(self._group)
        work = {index: (share,) for index in range(size) if (share := list(rollouts[index::size]))}
        results, dead = self._group.call(method, work)
        if dead:
            self._revive(dead)
            again, still_dead = self._group.call(method, {index: work[index] for index in dead})
            if still_dead:
                raise EngineError(f"reward pool {still_dead[0]} died twice on the same rollouts")
            results.update(again)
        dealt: list[Any] = [None] * len(rollouts)
        for index, share in results.items():
            dealt[index::size] = share
        return dealt

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """Return one record per rollout, in order, around the very rollouts given."""
        scored: list[Scored] = self._deal("score", rollouts)
        for record, rollout in zip(scored, rollouts, strict=True):
            record.rollout = rollout
        return scored

    def judge(self, rollouts: Sequence[Rollout]) -> list[dict[str, Verdict | Failure]]:
        """Return the verdicts per rollout, in order."""
        return self._deal("judge", rollouts)

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

    def close(self) -> None:
        """Stop the pools."""
        if self._group is not None:
            self._group.call("close", dict.fromkeys(range(len(self._group)), ()))
            self._group.close()
            self._group = None
