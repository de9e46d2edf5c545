"""Causal attention over sequences that ``C`` processes compute in parts.

A sequence is cut into ``2 C`` pieces; process ``r`` computes pieces ``r`` and ``2 C - 1 - r``, which costs
each process the same. A layer gathers the keys and values of all parts; its backward pass sums their
gradients (as in the training of Llama 3, arXiv:2407.21783, section 3.3.2).

Axes: ``B`` samples, ``L`` tokens of a piece, ``H`` heads, ``K`` key-value heads, ``D`` head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface

from multitask_rl.attention.interface import check_options, current_peers, exchange

CONTEXT = "multitask_rl_context_parallel"
MASK_CELLS = 2**25
"""Queries times keys of one mask: 32 MiB of booleans, 128 MiB as float32."""


def pieces_of(index: int, number: int) -> tuple[int, int]:
    """Return the pieces that process ``index`` of ``number`` computes."""
    return index, 2 * number - 1 - index


def context_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend causally from this process's positions to all positions (``transformers``' attention interface).

    ``query`` is [B, H, 2 L, D], ``key`` and ``value`` are [B, K, 2 L, D].

    Raises:
        NotImplementedError: there is a mask, or see ``check_options``.
    """
    if attention_mask is not None:
        raise NotImplementedError("attention over parts of sequences takes no mask")
    scaling: float | None = kwargs.pop("scaling", None)
    check_options(kwargs, "in parts")
    peers = current_peers()
    number, width = peers.peers, key.shape[-1]
    # every process uses all parts [C, B, ...], so their gradients are summed over processes
    parts = exchange(torch.cat([key, value], dim=-1), peers.gather_peers, peers.sum_rows)
    length = key.shape[2] // 2
    halves = [(p, 0) if p < number else (2 * number - 1 - p, 1) for p in range(2 * number)]
    everything = torch.cat(
        [parts[owner, :, :, half * length : (half + 1) * length] for owner, half in halves], dim=2
    )
    keys, values = everything[..., :width], everything[..., width:]
    outputs = []
    for half, number_of_piece in enumerate(pieces_of(peers.peer_index, number)):
        start, stop = half * length, (half + 1) * length
        while start < stop:
            before = number_of_piece * length + start - half * length
            end = stop if not before else min(stop, start + max(1, MASK_CELLS // (before + length)))
            seen = before + end - start
            part = query[:, :, start:end], keys[:, :, :seen], values[:, :, :seen], scaling
            outputs.append(checkpoint(_attend, *part, use_reentrant=False, preserve_rng_state=False))
            start = end
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attend causally; the last query has the position of the last key.

    The backward pass computes it again, so the mask is not kept.
    """
    asked, seen = query.shape[2], key.shape[2]
    mask = None
    if asked < seen:
        mask = torch.ones(asked, seen, dtype=torch.bool, device=query.device).tril(seen - asked)
    is_grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
    )


AttentionInterface.register(CONTEXT, context_attention)
AttentionMaskInterface.register(CONTEXT, lambda *_, **__: None)
