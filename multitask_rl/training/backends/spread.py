"""Sampling on all learner ranks, for an engine that samples from the actor's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from multitask_rl.rollout.base import Ended, Generation, GenerationRequest, RolloutEngine, collect

__all__ = ["Sample", "SpreadEngine"]

OwnStream = Callable[[Sequence[GenerationRequest]], Iterator[list[Ended]]]
Sample = Callable[[Sequence[GenerationRequest], OwnStream], Iterator[list[Ended]]]
"""From requests and this process's own stream to the stream of all ranks."""


class SpreadEngine(RolloutEngine):
    """``engine`` in rank 0 and one like it in every other rank.

    Samples carry their seeds: where one is drawn changes nothing but the last bits of its log-probabilities.

    Args:
        engine: of this process, with ``shares_weights``.
        sample: lets the ranks sample; sends them weights that have changed first.
    """

    shares_weights = True

    def __init__(self, engine: RolloutEngine, sample: Sample) -> None:
        self._engine, self._sample = engine, sample
        self.can_watch = engine.can_watch
        self.policy_version = engine.policy_version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """Return ``len(seeds)`` generations per request (see ``RolloutEngine``)."""
        return collect(requests, self.generate_stream(requests))

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        """Yield samples as they end (see ``RolloutEngine``)."""
        return self._sample(requests, self._engine.generate_stream)

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Take note of the version; the weights are the actor's own."""
        self._engine.update_weights(weights, policy_version)
        self.policy_version = policy_version

    def close(self) -> None:
        """Free the engine of this process. Idempotent."""
        self._engine.close()
