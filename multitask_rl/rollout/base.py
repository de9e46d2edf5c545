"""The contract of a rollout engine: prompts in, responses with token ids and log-probabilities out.

An engine knows no tasks, rewards or algorithms. Every request has its own sampling parameters and seeds, so
one call may mix tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from multitask_rl.records import Event, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from multitask_rl.config.run import RolloutConfig
    from multitask_rl.models.actor import Actor


class Monitor(Protocol):
    """Reads responses while they are generated, and may end them."""

    def check(self, partial: Sequence[tuple[int, list[int]]]) -> Sequence[bool]:
        """Return whether each response ends here; its last token is kept.

        Args:
            partial: seed and token ids so far of every response that is due, from the whole batch.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """A monitor and its interval. A response that ends by itself is not shown to it again."""

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
    """One 63-bit seed per sample. The same weights, prompt and seed give the same tokens in every call."""
    watch: Watch | None = None
    """Monitor of the samples; only for engines with ``can_watch``."""
    conversations: Sequence[int] = ()
    """Per sample the number of its conversation: a later request of that number continues it, so that the
    engine may keep the keys and values. Empty: nothing continues these samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One sampled response: token ids, their log-probabilities, and why it ended."""

    response_ids: list[int]
    """[T] with the end token if it was sampled."""
    rollout_logprobs: list[float]
    """[T] nats under the sampled distribution; under temperature 0 those of temperature 1."""
    finish_reason: str
    """``stop`` | ``length`` | ``flagged`` (the request's monitor ended it)"""


Ended = tuple[int, int, Generation]
"""Index of the request, index of the sample in it, its generation."""


class RolloutEngine:
    """Base of all engines.

    An engine overrides ``build``, ``update_weights``, ``close`` where it holds resources, and ``generate`` or
    ``generate_stream``. Its class attributes declare further abilities; the trainer uses no others.
    """

    shares_weights: bool = False
    """It samples from the actor's own tensors: ``update_weights`` is called with none."""
    can_watch: bool = False
    """Requests may have a ``Watch``."""
    can_constrain: bool = False
    """Requests may have a grammar (``SamplingParams.grammar``)."""
    can_admit: bool = False
    """``admit`` works: requests may join the open stream."""
    policy_version: int = 0
    """Version of the weights in use."""

    @classmethod
    def check(cls) -> None:
        """Refuse, before the actor loads, what this machine cannot run. Default: nothing is refused.

        With Ray it is not called: the machine of the engine may have what this one lacks.

        Raises:
            MissingExtraError: the engine's library is not installed.
        """

    @classmethod
    def build(cls, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> RolloutEngine:
        """Return an engine with the present weights of ``actor``.

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
            EngineError: the engine cannot continue (never for a single odd prompt).
        """
        if type(self).generate_stream is RolloutEngine.generate_stream:
            raise NotImplementedError
        return collect(requests, self.generate_stream(requests))

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        """Yield the samples of ``generate(requests)`` as they end, each once, in any order.

        Their rewards are computed while the others are generated. Default: all at once.
        """
        groups = self.generate(requests)
        yield [(i, j, g) for i, group in enumerate(groups) for j, g in enumerate(group)]

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Add ``requests`` to the open stream, between two of its parts; only with ``can_admit``.

        Their numbers continue those of the stream's requests, and the stream yields their samples.
        """
        raise NotImplementedError

    def retain(self, conversations: Collection[int]) -> None:
        """Drop cached keys and values of all conversations except ``conversations``. Default: nothing."""

    def call_between_steps(self, hook: Callable[[], None]) -> bool:
        """Call ``hook`` after each decode step from now on; what it raises ends the stream.

        Returns:
            Whether the engine can. Default: no.
        """
        return False

    def sleep(self) -> None:
        """Give the device's memory back until the next call. Default: nothing."""

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Use ``weights`` (the actor's state dict) from now on.

        Read each weight once, in order, and keep none: a sharded actor gathers its weights as they are read.
        """
        raise NotImplementedError

    def health_events(self, step: int) -> list[Event]:
        """Return what happened to the engine since the last call. Default: nothing."""
        return []

    def close(self) -> None:
        """Free the engine. Idempotent. Default: nothing."""


class WrappedEngine(RolloutEngine):
    """Passes every call on to ``engine``; a subclass overrides what it does itself."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self.shares_weights, self.policy_version = engine.shares_weights, engine.policy_version
        self.can_watch, self.can_admit = engine.can_watch, engine.can_admit
        self.can_constrain = engine.can_constrain

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        """See ``RolloutEngine``."""
        return self._engine.generate_stream(requests)

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """See ``RolloutEngine``."""
        self._engine.admit(requests)

    def retain(self, conversations: Collection[int]) -> None:
        """See ``RolloutEngine``."""
        self._engine.retain(conversations)

    def call_between_steps(self, hook: Callable[[], None]) -> bool:
        """See ``RolloutEngine``."""
        return self._engine.call_between_steps(hook)

    def sleep(self) -> None:
        """See ``RolloutEngine``."""
        self._engine.sleep()

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """See ``RolloutEngine``."""
        self._engine.update_weights(weights, policy_version)
        self.policy_version = policy_version

    def health_events(self, step: int) -> list[Event]:
        """See ``RolloutEngine``."""
        return self._engine.health_events(step)

    def close(self) -> None:
        """See ``RolloutEngine``."""
        self._engine.close()


def collect(
    requests: Sequence[GenerationRequest], parts: Iterable[Sequence[Ended]]
) -> list[list[Generation]]:
    """Return the samples in ``parts``, which ``generate_stream`` yields, in the order of ``generate``."""
    found = {(i, j): generation for part in parts for i, j, generation in part}
    return [[found[i, j] for j in range(len(request.seeds))] for i, request in enumerate(requests)]


def look(shown: Sequence[tuple[Monitor, int, list[int]]]) -> list[int]:
    """Show unfinished responses (monitor, seed, token ids so far) to their monitors; one call per monitor.

    Returns:
        Positions of the responses that end.
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
    """Return the most tokens that a request may take; its prompt counts once."""
    return len(request.prompt_ids) + len(request.seeds) * request.sampling.max_new_tokens


def push_weights(engine: RolloutEngine, actor: Actor) -> None:
    """Give ``engine`` the present weights of ``actor``."""
    import torch  # not at the top: plugins are listed without it

    torch.clear_autocast_cache()  # it holds casts of the old weights, made by the rollout thread
    engine.update_weights({} if engine.shares_weights else actor.state_dict(), actor.policy_version)
