"""Sampling from a copy of the actor's weights, for an engine that samples from the actor's own tensors.

While the next batch is sampled during an update, the engine must not see weights that change under it. One
copy is kept and filled anew at every ``update_weights``: as much memory as the weights take once more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from multitask_rl.rollout.base import Ended, Generation, GenerationRequest, RolloutEngine

if TYPE_CHECKING:
    from torch import Tensor

    from multitask_rl.config.run import RolloutConfig
    from multitask_rl.models.actor import Actor

__all__ = ["SnapshotEngine", "SnapshotFactory"]


@dataclass(frozen=True, slots=True)
class SnapshotFactory:
    """Stands where an engine class with ``shares_weights`` stands; its engines sample from a copy."""

    engine: type[RolloutEngine]

    def build(self, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> SnapshotEngine:
        """Return the engine over a copy of ``actor``'s model as it is now."""
        double = copy.copy(actor)
        # nothing takes a gradient, but of other weights autocast would make a new cast for every token
        double.model = copy.deepcopy(actor.model).requires_grad_(True).eval()
        engine = self.engine.build(double, config, seed=seed, output_dir=output_dir)
        return SnapshotEngine(engine, source=actor.model, double=double.model)


class SnapshotEngine(RolloutEngine):
    """``engine``, whose model ``double`` is made equal to ``source`` when ``update_weights`` is called."""

    shares_weights = True

    def __init__(self, engine: RolloutEngine, *, source: Any, double: Any) -> None:
        self._engine, self._source, self._double = engine, source, double
        self.can_watch = engine.can_watch
        self.policy_version = engine.policy_version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """Return ``len(seeds)`` generations per request (see ``RolloutEngine``)."""
        return self._engine.generate(requests)

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        """Yield samples as they end (see ``RolloutEngine``)."""
        return self._engine.generate_stream(requests)

    @torch.no_grad()
    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Take the source's weights as they are."""
        own = self._double.state_dict()
        for name, value in self._source.state_dict().items():
            own[name].copy_(value)
        self._engine.update_weights(weights, policy_version)
        self.policy_version = policy_version

    def close(self) -> None:
        """Free the engine. Idempotent."""
        self._engine.close()
