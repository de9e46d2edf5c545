"""Engine replicas as Ray actors behind ``RolloutEngine``.

Samples carry their own seeds, so where one is drawn changes nothing. A replica that dies is started again
once, with the newest weights, and its share is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from multitask_rl.errors import EngineError
from multitask_rl.executor.group import ActorGroup
from multitask_rl.rollout.base import Generation, GenerationRequest, RolloutEngine

if TYPE_CHECKING:
    from torch import Tensor

    from multitask_rl.config.run import RolloutConfig
    from multitask_rl.training.actor import Actor

__all__ = ["EngineFactory", "RayEngine", "RayEngineFactory"]


class EngineFactory(Protocol):
    """An engine class, as the entry points name it."""

    @property
    def shares_weights(self) -> bool:
        """Its engines sample from the actor's own tensors."""
        ...

    def build(self, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> RolloutEngine:
        """Return the engine of ``actor``."""
        ...


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
        self._group: ActorGroup | None = ActorGroup(
            "rollout replica", make, num_replicas, num_cpus=num_cpus, num_gpus=num_gpus
        )

    def _open(self) -> ActorGroup:
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

    def _revive(self, group: ActorGroup, dead: Sequence[int]) -> None:
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
