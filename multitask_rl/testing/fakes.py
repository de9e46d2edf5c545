"""Public fakes: what stands in for the heavy parts in a test, deterministic and honest to the contract."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from multitask_rl.errors import EngineError
from multitask_rl.rollout.base import Generation, GenerationRequest, RolloutEngine
from multitask_rl.seeding import derive_seed

if TYPE_CHECKING:
    from torch import Tensor


class FakeEngine(RolloutEngine):
    """A rollout engine without a model: tokens depend on the weights' version, the prompt and the seed only.

    Args:
        vocab_size: ids are drawn uniformly from ``1 .. vocab_size - 1``.
        eos_id: the end token; sampled with probability ``1 / 8`` at each position.
        respond: from prompt ids and seed to response ids (cut at ``max_new_tokens``), instead of drawing.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 128,
        eos_id: int = 0,
        respond: Callable[[Sequence[int], int], Sequence[int]] | None = None,
    ) -> None:
        self.policy_version = 0
        self.requests: list[GenerationRequest] = []
        """Everything asked so far."""
        self._vocab_size, self._eos_id, self._respond = vocab_size, eos_id, respond
        self._closed = False

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """Return ``len(seeds)`` generations per request, in order.

        Raises:
            EngineError: the engine was closed.
        """
        if self._closed:
            raise EngineError("FakeEngine.generate: the engine was closed")
        self.requests.extend(requests)
        return [[self._one(request, seed) for seed in request.seeds] for request in requests]

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Take note of the version; the weights are not looked at."""
        self.policy_version = policy_version

    def close(self) -> None:
        """Refuse further requests. Idempotent."""
        self._closed = True

    def _one(self, request: GenerationRequest, seed: int) -> Generation:
        limit = request.sampling.max_new_tokens
        if self._respond is not None:
            ids = list(self._respond(request.prompt_ids, seed))[:limit]
        else:
            drawn = seed if request.sampling.temperature > 0 else 0
            stream = random.Random(derive_seed(drawn, "fake", self.policy_version, *request.prompt_ids))
            ids = []
            while len(ids) < limit and self._eos_id not in ids[-1:]:
                ends = stream.random() < 1 / 8
                ids.append(self._eos_id if ends else stream.randrange(1, self._vocab_size))
        ended = bool(ids) and ids[-1] == self._eos_id
        return Generation(
            response_ids=ids,
            rollout_logprobs=[-1.0 - (i % 7) / 10 for i in ids],
            finish_reason="stop" if ended or len(ids) < limit else "length",
        )
