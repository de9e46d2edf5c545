"""The rollout engine's contract: prompts in, token-exact responses out.

Engines know nothing of tasks, rewards or algorithms. Every request carries its own sampling parameters and
seed, so that one call may mix tasks freely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from multitask_rl.records import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Generation", "GenerationRequest", "Monitor", "RolloutEngine", "Watch"]


class Monitor(Protocol):
    """Looks at responses while they are generated, and may end them."""

    def check(self, partial: Sequence[tuple[int, list[int]]]) -> Sequence[bool]:
        """Return whether each response is to end here, its last token included.

        Args:
            partial: seed and token ids so far of every response whose turn it is, over the whole batch.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """A monitor and its rhythm. A response that ends by itself is not shown to it again."""

    monitor: Monitor
    every: int
    """Tokens between two looks, >= 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """``len(seeds)`` samples of one prompt."""

    prompt_ids: Sequence[int]
    """[P], P >= 1."""
    sampling: SamplingParams
    seeds: Sequence[int]
    """One 63-bit seed per sample: same weights, prompt and seed give the same tokens, whatever else is in
    the call."""
    watch: Watch | None = None
    """Who looks at the responses while they are generated. Only for engines with ``can_watch``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One sampled response."""

    response_ids: list[int]
    """[T] with the end token if it was sampled."""
    rollout_logprobs: list[float]
    """[T] nats under the sampled distribution; under temperature 0 those of temperature 1."""
    finish_reason: str
    """``stop`` | ``length`` | ``flagged`` (the request's monitor ended it)"""


class RolloutEngine(Protocol):
    """Generates, and follows the actor's weights."""

    shares_weights: bool
    """It samples from the actor's own tensors: ``update_weights`` is called with none."""
    policy_version: int
    """Version of the weights in use."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """Return one list of generations per request, in order, ``len(seeds)`` each.

        Raises:
            EngineError: the engine cannot go on (never for a single odd prompt).
        """
        ...

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Use ``weights`` (the actor's state dict) from now on."""
        ...

    def close(self) -> None:
        """Free the engine. Idempotent."""
        ...
