"""Sampling from one copy of the actor's weights, for an engine that samples from the actor's own tensors.

An overlapped run samples the next batch during an update, which must not change the engine's weights.
``update_weights`` fills the copy again.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from multitask_rl.rollout.base import Ended, GenerationRequest, RolloutEngine

if TYPE_CHECKING:
    from torch import Tensor

    from multitask_rl.config.run import RolloutConfig
    from multitask_rl.models.actor import Actor


@dataclass(frozen=True, slots=True)
class SnapshotFactory:
    """Builds engines of a class with ``shares_weights`` that sample from a copy."""

    engine: type[RolloutEngine]

    def build(self, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> SnapshotEngine:
        """Return the engine over a copy of ``actor``'s present model."""
        double = copy.copy(actor)
        # autocast keeps its casts of weights with requires_grad only; others it casts again for every token
        double.model = copy.deepcopy(actor.model).requires_grad_(True).eval()
        engine = self.engine.build(double, config, seed=seed, output_dir=output_dir)
        return SnapshotEngine(engine, source=actor.model, double=double.model)


class SnapshotEngine(RolloutEngine):
    """Samples with ``engine`` from ``double``, a copy of the model ``source``.

    ``update_weights`` copies the present weights of ``source`` into it.
    """

    shares_weights = True

    def __init__(self, engine: RolloutEngine, *, source: Any, double: Any) -> None:
        self._engine, self._source, self._double = engine, source, double
        self.can_watch = engine.can_watch
        self.policy_version = engine.policy_version

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        """See ``RolloutEngine``."""
        return self._engine.generate_stream(requests)

    def retain(self, conversations: Collection[int]) -> None:
        """See ``RolloutEngine``."""
        self._engine.retain(conversations)

    @torch.no_grad()
    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Copy the present weights of ``source``; ``weights`` is empty and not read."""
        own = self._double.state_dict()
        for name, value in self._source.state_dict().items():
            own[name].copy_(value)
        self._engine.update_weights(weights, policy_version)
        self.policy_version = policy_version

    def close(self) -> None:
        """See ``RolloutEngine``."""
        self._engine.close()
