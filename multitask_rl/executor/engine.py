"""Engine replicas as Ray actors behind ``RolloutEngine``.

Samples carry their own seeds, so where one is drawn changes nothing. They are handed on as they end,
whichever replica they come from. A replica that dies is started again once, with the newest weights, and what
had not ended there is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from multitask_rl.config.run import ModelConfig, RolloutConfig
from multitask_rl.errors import EngineError
from multitask_rl.executor.group import ActorGroup
from multitask_rl.executor.replica import EngineReplica, Look, without_monitors
from multitask_rl.models.actor import Actor
from multitask_rl.rollout.base import (
    Ended,
    Generation,
    GenerationRequest,
    RolloutEngine,
    collect,
    most_tokens,
)
from multitask_rl.training.balance import share_out

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["EngineFactory", "RayEngine", "RayEngineFactory"]


class EngineFactory(Protocol):
    """An engine class, or what stands for one."""

    def build(self, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> RolloutEngine:
        """Return the engine of ``actor``."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RayEngineFactory:
    """Stands where the engine class stands: ``build`` returns ``num_replicas`` of it behind one engine."""

    engine: type[RolloutEngine]
    num_replicas: int
    num_cpus: float = 1.0
    """Per replica, and the threads torch uses in it."""
    num_gpus: float = 0.0
    """Per replica."""

    def build(self, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> RayEngine:
        """Write the actor to ``<output_dir>/ray_start`` and start the replicas from there."""
        directory = (output_dir / "ray_start").resolve()
        actor.save_for_engine(directory)
        make = partial(
            _make_replica,
            self.engine,
            str(directory),
            actor.tokenizer,
            config,
            seed,
            "cuda" if self.num_gpus else "cpu",
            actor.config.autocast,
        )
        engine = RayEngine(
            make, num_replicas=self.num_replicas, num_cpus=self.num_cpus, num_gpus=self.num_gpus
        )
        engine.can_watch = self.engine.can_watch
        engine.update_weights(actor.state_dict(), actor.policy_version)
        return engine


def _make_replica(
    engine: type[RolloutEngine],
    directory: str,
    tokenizer: Any,
    config: RolloutConfig,
    seed: int,
    device: str,
    autocast: bool,
    index: int,
) -> EngineReplica:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", attn_implementation="sdpa")
    model.to(device).eval()
    actor = Actor(model, tokenizer, ModelConfig(name_or_path=directory, autocast=autocast))
    output_dir = Path(directory) / f"replica-{index}"
    return EngineReplica(engine.build(actor, config, seed=seed, output_dir=output_dir), actor)


class RayEngine(RolloutEngine):
    """``RolloutEngine`` over replicas in Ray actors.

    Args:
        make: builds replica ``index`` in its actor; an ``EngineReplica``, or what has its methods.
        num_replicas: how many.
        num_cpus: per replica.
        num_gpus: per replica.

    Raises:
        MissingExtraError: Ray is not installed.
    """

    can_watch = True
    """Requests may carry a ``Watch``; the replicas' engine decides."""

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
        return collect(requests, self.generate_stream(requests))

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        """Yield samples as they end, from all replicas (see ``RolloutEngine``)."""
        group = self._open()
        call = _Call(group, requests)
        died: set[int] = set()
        try:
            for index in call.shares:
                call.begin(index)
            while call.under_way:
                index, happened = call.next()
                if happened is None:
                    if index in died:
                        raise EngineError(f"rollout replica {index} died twice on the same requests")
                    died.add(index)
                    self._revive(group, [index])
                    call.begin(index)
                elif happened:
                    yield happened
        finally:
            if self._group is group:
                call.stop()

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


class _Call:
    """What one call asked of the replicas, and what of it has ended."""

    def __init__(self, group: ActorGroup, requests: Sequence[GenerationRequest]) -> None:
        self._group = group
        self._requests, self._monitors = without_monitors(requests)
        self._open = [dict.fromkeys(range(len(request.seeds))) for request in requests]
        """Per request the samples that have not ended, in order."""
        shares = share_out([most_tokens(request) for request in requests], len(group))
        self.shares = {index: share for index, share in enumerate(shares) if share}
        """Requests by replica."""
        self._given: dict[int, list[tuple[int, list[int]]]] = {}
        """By replica: requests as it counts them, with the samples asked for."""
        self.under_way: dict[Any, int] = {}
        """Calls that have not returned, with the replica they went to."""

    def begin(self, index: int) -> None:
        """Give a replica what has not ended of its share."""
        given = [(i, list(self._open[i])) for i in self.shares[index] if self._open[i]]
        self._given[index] = given
        asked = [
            replace(self._requests[i], seeds=[self._requests[i].seeds[j] for j in js]) for i, js in given
        ]
        self._group.submit(index, "begin", asked)
        self._advance(index, None)

    def _advance(self, index: int, answer: Sequence[bool] | None) -> None:
        self.under_way[self._group.submit(index, "advance", answer)] = index

    def next(self) -> tuple[int, list[Ended] | None]:
        """Wait for one replica; return it with what ended there, None if it died."""
        reference, result = self._group.first(self.under_way)
        index = self.under_way.pop(reference)
        if result is None:
            return index, None
        events, is_all = result
        answer = None
        ended: list[Ended] = []
        for event in events:
            if isinstance(event, Look):  # the last one: the replica waits
                answer = self._monitors[event.monitor].check(event.partial)
                continue
            for request, sample, generation in event:
                i, samples = self._given[index][request]
                del self._open[i][samples[sample]]
                ended.append((i, samples[sample], generation))
        if not is_all:
            self._advance(index, answer)
        return index, ended

    def stop(self) -> None:
        """Have the replicas give up what is under way."""
        if self.under_way:
            self._group.call("stop", dict.fromkeys(self.under_way.values(), ()))
