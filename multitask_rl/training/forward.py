"""One forward over a micro-batch: what the losses need, for response tokens only.

Axes: ``N`` response tokens, ``V`` vocabulary, ``H`` hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multitask_rl.records import SamplingParams
from multitask_rl.rollout.sampling import TokenMask, keep_top
from multitask_rl.training.microbatch import MicroBatch
from multitask_rl.training.shared_prompt import shared_logits

__all__ = ["TokenOutputs", "forward_tokens", "response_hidden", "response_logits"]


@dataclass(kw_only=True, slots=True)
class TokenOutputs:
    """What the model says of the response tokens of a micro-batch."""

    logprobs: Tensor
    """[N] nats, under the sampled distribution (grammar, temperature, top-k, top-p), float32."""
    logits: Tensor
    """[N, V] float32, after grammar, temperature and filter."""
    hidden: Tensor | None = None
    """[N, H] last hidden state at the position before each token."""
    forced: Tensor | None = None
    """[N] bool: a grammar left a single token; None if no sample of the micro-batch has a grammar."""


def response_logits(model: Any, batch: MicroBatch, *, want_hidden: bool) -> tuple[Tensor, Tensor | None]:
    """Return the logits [N, V] that predict the response tokens, and the hidden states [N, H] if wanted."""
    if batch.shared:
        return shared_logits(model, batch.shared, want_hidden=want_hidden)
    first = int(batch.column.min())
    packed = batch.input_ids.shape[0] == 1 and bool((batch.position_ids[0] == 0).sum() > 1)
    # one packed row: exactly the columns that predict; padded rows: all columns from the first that does
    keep: Any = (
        batch.column if packed else torch.arange(first, batch.input_ids.shape[1], device=batch.column.device)
    )
    out = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        output_hidden_states=want_hidden,
        logits_to_keep=keep,
    )
    logits = out.logits[0] if packed else out.logits[batch.row, batch.column - first]
    hidden = out.hidden_states[-1][batch.row, batch.column] if want_hidden else None
    return logits, hidden


def response_hidden(model: Any, batch: MicroBatch) -> Tensor:
    """Return the last hidden states [N, H] at the position before each response token."""
    hidden = response_logits(model, batch, want_hidden=True)[1]
    if hidden is None:
        raise AssertionError("hidden states were asked for")
    return hidden


def forward_tokens(
    model: Any,
    batch: MicroBatch,
    sampling: list[SamplingParams],
    *,
    want_hidden: bool = False,
    mask: TokenMask | None = None,
) -> TokenOutputs:
    """Run ``model`` and return log-probabilities of the response tokens as the engine sampled them.

    Args:
        model: causal language model; gradients flow unless the caller turned them off.
        batch: micro-batch on the model's device.
        sampling: [B] sampling parameters per sample; temperature 0 counts as 1 (greedy has no distribution).
        want_hidden: also return the last hidden states (for value heads).
        mask: what grammars allowed at the response tokens that have one.
    """
    logits, hidden = response_logits(model, batch, want_hidden=want_hidden)
    logits = logits.float()
    if mask is not None:
        logits = mask.apply(logits)
    temperatures = torch.tensor([s.temperature or 1.0 for s in sampling], device=logits.device)
    if bool((temperatures != 1.0).any()):
        logits = logits / temperatures[batch.sequence].unsqueeze(-1)
    for top_k, top_p in {(s.top_k, s.top_p) for s in sampling if s.top_k > 0 or s.top_p < 1.0}:
        chosen = torch.tensor([(s.top_k, s.top_p) == (top_k, top_p) for s in sampling], device=logits.device)
        tokens = chosen[batch.sequence].nonzero().squeeze(-1)
        filtered = keep_top(logits[tokens], top_k, top_p, keep=batch.targets[tokens])
        logits = logits.index_copy(0, tokens, filtered)
    picked = logits.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
    forced = None
    if mask is not None:
        forced = torch.zeros_like(picked, dtype=torch.bool).index_copy(0, mask.tokens, mask.forced)
    return TokenOutputs(
        logprobs=picked - logits.logsumexp(dim=-1), logits=logits, hidden=hidden, forced=forced
    )
