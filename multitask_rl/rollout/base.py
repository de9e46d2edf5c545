"""The rollout engine's contract: prompts in, token-exact responses out.

Engines know nothing of tasks, rewards or algorithms. Every request carries its own sampling parameters and
seed, so that one call may mix tasks freely.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from multitask_rl.records import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from multitask_rl.config.run import RolloutConfig
    from multitask_rl.models.actor import Actor

__all__ = [
    "Ended",
    "Generation",
    "GenerationRequest",
    "Monitor",
    "RolloutEngine",
    "Watch",
    "collect",
    "look",
    "most_tokens",
    "push_weights",
]


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


Ended = tuple[int, int, Generation]
"""Index of the request, index of the sample in it, what was generated."""


class RolloutEngine:
    """Base of all engines: generates, and follows the actor's weights.

    An engine overrides ``build``, ``generate``, ``update_weights`` and ``close``. Its class attributes
    declare what it can do beyond them; the trainer uses nothing that is not declared.
    """

    shares_weights: bool = False
    """It samples from the actor's own tensors: ``update_weights`` is called with none."""
    can_watch: bool = False
    """Requests may carry a ``Watch``."""
    can_admit: bool = False
    """``admit`` works: requests may join the stream that is open."""
    policy_version: int = 0
    """Version of the weights in use."""

    @classmethod
    def build(cls, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> RolloutEngine:
        """Return the engine that samples as ``actor`` does now.

        Args:
            actor: model, tokenizer and configuration.
            config: ``rollout`` of the run; ``config.engine_config`` holds the engine's own keys.
            seed: of the run.
            output_dir: of the run; the engine may write there.
        """
        raise NotImplementedError

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """Return one list of generations per request, in order, ``len(seeds)`` each.

        Raises:
            EngineError: the engine cannot go on (never for a single odd prompt).
        """
        raise NotImplementedError

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        """Yield the samples of ``generate(requests)`` as they end, each once, in any order.

        Rewards of what has ended begin while the rest is generated. Default: all at once.
        """
        groups = self.generate(requests)
        yield [(i, j, g) for i, group in enumerate(groups) for j, g in enumerate(group)]

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Add ``requests`` to the open stream, between two of its parts; only with ``can_admit``.

        They are numbered from its last request on, and their samples come out of it.
        """
        raise NotImplementedError

    def sleep(self) -> None:
        """Give the device's memory back until the next call. Default: nothing."""

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Use ``weights`` (the actor's state dict) from now on."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the engine. Idempotent. Default: nothing."""


def collect(
    requests: Sequence[GenerationRequest], parts: Iterable[Sequence[Ended]]
) -> list[list[Generation]]:
    """Return what ``generate_stream`` yielded as ``generate`` returns it."""
    found = {(i, j): generation for part in parts for i, j, generation in part}
    return [[found[i, j] for j in range(len(request.seeds))] for i, request in enumerate(requests)]


def look(shown: Sequence[tuple[Monitor, int, list[int]]]) -> list[int]:
    """Show unfinished responses (monitor, seed, token ids so far) to their monitors; one call per monitor.

    Returns:
        Positions of those that are to end.
    """
    by_monitor: dict[int, list[int]] = {}
    for position, (monitor, _, _) in enumerate(shown):
        by_monitor.setdefault(id(monitor), []).append(position)
    ended: list[int] = []
    for positions in by_monitor.values():
        monitor = shown[positions[0]][0]
        answers = monitor.check([(shown[p][1], shown[p][2]) for p in positions])
        ended += [p for p, ends in zip(positions, answers, strict=True) if ends]
    return ended


def most_tokens(request: GenerationRequest) -> int:
    """Return the tokens a request may take, its prompt counted once."""
    return len(request.prompt_ids) + len(request.seeds) * request.sampling.max_new_tokens


def push_weights(engine: RolloutEngine, actor: Actor) -> None:
    """Let ``engine`` sample from the weights of ``actor`` as they are."""
    engine.update_weights({} if engine.shares_weights else actor.state_dict(), actor.policy_version)
