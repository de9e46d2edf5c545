"""What trackers store of the tokens of a response: texts, log-probabilities, advantages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multitask_rl.records import Rollout, Scored, TokenRecord
from multitask_rl.training.backend import CreditedSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Sampled = tuple[str, int, int]
"""Group, sample and attempt of a rollout."""


def sampled_as(rollout: Rollout) -> Sampled:
    """Return what identifies a rollout within its step."""
    return rollout.group_id, rollout.sample, rollout.attempt


def advantages_of(credited: Iterable[CreditedSample]) -> dict[Sampled, Tensor]:
    """Return the advantages [T] of each rollout with tokens in the loss; parts of an episode are joined."""
    found: dict[Sampled, list[CreditedSample]] = {}
    for one in credited:
        found.setdefault(sampled_as(one.sample.scored.rollout), []).append(one)
    return {
        key: torch.cat([part.advantages for part in own])
        for key, own in found.items()
        if any(part.num_choices for part in own)
    }


class TokenTexts:
    """Texts of single tokens, each decoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # behind another token, because the first one of a text may lose its space
        self._before = list(tokenizer.encode("a", add_special_tokens=False))[-1:]
        self._start = len(self._decode(self._before))
        self._known: dict[int, str] = {}

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token; of a part of a character the replacement character."""
        for token in ids:
            if token not in self._known:
                self._known[token] = self._decode([*self._before, token])[self._start :]
        return [self._known[token] for token in ids]


def with_tokens(
    scored: Iterable[Scored], texts: TokenTexts, advantages: Mapping[Sampled, Tensor]
) -> list[Scored]:
    """Return the records with their ``tokens``: log-probabilities to 3 decimals, advantages to 3 digits."""
    found = []
    for one in scored:
        rollout = one.rollout
        own = advantages.get(sampled_as(rollout))
        values = [] if own is None else own.tolist()
        if len(set(values)) == 1:
            values = values[:1]
        values = [float(f"{value:.3g}") for value in values]
        tokens = TokenRecord(
            texts=texts.of(rollout.response_ids),
            logprobs=[round(value, 3) + 0.0 for value in rollout.rollout_logprobs],
            advantages=values[0] if len(values) == 1 else values or None,
        )
        found.append(replace(one, tokens=tokens))
    return found
