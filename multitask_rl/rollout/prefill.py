"""Prompts into the key-value cache, a bounded number of tokens at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["CHUNK_TOKENS", "prefill"]

CHUNK_TOKENS = 8192
"""Prompt tokens of one forward: enough to fill the machine, few enough to bound its activations."""
MASK_CELLS = 2**25
"""Queries times keys of one forward after the first: their mask is a tensor, 128 MiB in float32."""


def prefill(
    model: Any,
    ids: Tensor,
    cache: Any,
    *,
    mask: Tensor | None,
    positions: Tensor,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Compute the prompts ``ids`` [U, P] (left-padded) into ``cache`` and return the next logits [U, V].

    Every token sees what it would see in one forward over all of them: its own chunk causally and, through
    the cache, all chunks before.

    Args:
        model: causal language model of ``transformers``.
        ids: [U, P].
        cache: empty, filled in place.
        mask: [U, P] with 0 on the padding; None without padding.
        positions: [U, P].
        chunk_tokens: tokens of one forward at most, over all rows; a single column always goes. Default:
            ``CHUNK_TOKENS``.
    """
    rows, width = ids.shape
    size = max(1, (chunk_tokens or CHUNK_TOKENS) // rows)
    logits = ids.new_empty(0)
    start = 0
    while start < width:
        end = min(start + size, width)
        if start:
            end = min(end, start + max(1, MASK_CELLS // (rows * end)))
        out = model(
            input_ids=ids[:, start:end],
            attention_mask=None if mask is None else mask[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = out.logits[:, -1]
        start = end
    return logits
