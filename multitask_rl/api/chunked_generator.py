"""Sampling after long prompts with bounded memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from multitask_rl.config.run import ModelConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import Actor, make_actor
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import Generation, GenerationRequest
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.seeding import derive_seed

logger = logging.getLogger(__name__)


class ChunkedGenerator:
    """Generates from a causal language model; prompts go through it ``chunk_size`` tokens at a time.

    The keys and values of earlier chunks are kept, so that every token sees what it would see in one forward
    pass; only the memory of activations is bounded. Prompts of one call are batched, and a prompt is computed
    once for all its samples.

    Args:
        model: a causal language model of ``transformers``, or an ``Actor``.
        max_length: longest prompt and response together, in tokens; cut to what the model's positions cover.
        chunk_size: prompt tokens of one forward pass, over all rows of a batch.
        use_kv_cache: keep keys and values. False computes the whole sequence again for every token: slow, for
            comparison and for models whose cache is in doubt.
        tokenizer: default: the one that comes with the model.

    Raises:
        ConfigError: a size below 1, or no tokenizer.
    """

    def __init__(
        self,
        model: Any,
        max_length: int,
        chunk_size: int = 4096,
        use_kv_cache: bool = True,
        *,
        tokenizer: Any = None,
    ) -> None:
        for name, value in (("max_length", max_length), ("chunk_size", chunk_size)):
            if value < 1:
                raise ConfigError(f"ChunkedGenerator: {name} must be >= 1, got {value!r}")
        self.actor = model if isinstance(model, Actor) else make_actor(model, tokenizer, ModelConfig())
        covered = self.actor.max_length
        if 0 < covered < max_length:
            logger.warning(
                "max_length=%d is cut to the %d positions that the model covers; rope_scaling gives it more",
                max_length,
                covered,
            )
        self.max_length = min(max_length, covered) if covered else max_length
        self.chunk_size = chunk_size
        self._engine = HFEngine(
            self.actor.model,
            eos_token_ids=self.actor.eos_token_ids,
            pad_token_id=self.actor.pad_token_id,
            decode=lambda ids: str(self.actor.tokenizer.decode(ids, skip_special_tokens=False)),
            prefill_tokens=chunk_size,
            grammars=lambda: self.actor.grammars,
            use_cache=use_kv_cache,
        )

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        num_samples: int = 1,
        sampling: SamplingParams | None = None,
        seed: int = 0,
    ) -> list[list[Generation]]:
        """Return ``num_samples`` generations per prompt: token ids, their log-probabilities (nats), the end.

        Args:
            prompts: texts, or token ids.
            num_samples: per prompt.
            sampling: temperature, length, stop strings; default: ``SamplingParams()``. Its ``max_new_tokens``
                is cut to what ``max_length`` leaves.
            seed: same seed, weights and prompt: same tokens.

        Raises:
            ConfigError: one text in place of a list, or a prompt that is empty or leaves no room for a
                response.
            EngineError: out of memory.
        """
        if isinstance(prompts, str):
            raise ConfigError("prompts: expected a list of texts, got one text; give [text]")
        sampling = sampling or SamplingParams()
        requests = []
        for index, prompt in enumerate(prompts):
            ids = self.actor.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
            room = self.max_length - len(ids)
            if not ids or room < 1:
                raise ConfigError(
                    f"prompts[{index}] has {len(ids)} tokens; it must have between 1 and max_length - 1 = "
                    f"{self.max_length - 1}"
                )
            seeds = [derive_seed(seed, index, sample) for sample in range(num_samples)]
            limited = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
            requests.append(GenerationRequest(prompt_ids=ids, sampling=limited, seeds=seeds))
        return self._engine.generate(requests)

    def texts(self, prompts: Sequence[str | Sequence[int]], **further: Any) -> list[list[str]]:
        """Return ``generate(prompts, ...)`` as texts, without special tokens."""
        decode = self.actor.tokenizer.decode
        groups = self.generate(prompts, **further)
        return [
            [str(decode(one.response_ids, skip_special_tokens=True)) for one in group] for group in groups
        ]
