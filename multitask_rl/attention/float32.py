"""Attention in float32 on CPUs under autocast, where bfloat16 takes longer for short sequences.

The products of attention are many and small, oneDNN compiles a bfloat16 product for each length, and rotated
keys are float32 anyway. Projections stay in bfloat16.

Where oneDNN multiplies float32 (``products.py``), short attention is made of plain products, without autocast
too: the kernel of torch multiplies with MKL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from multitask_rl.attention import products
from multitask_rl.attention.interface import strange_options

FLOAT32 = "multitask_rl_float32"
"""Name of ``attend_float32`` in ``transformers``' attention interface."""

LONGEST = 512
"""Keys per row up to which float32 pays: beyond, the bytes read cost more than the compilation."""

SCORE_CELLS = 2**21
"""Scores (rows times heads times queries times keys) that ``_multiply_rows`` makes at once: 8 MiB.

More leave the CPU's cache and are slower than the kernel of torch.
"""


def compiles_shapes(model: Any, *, autocast: bool) -> bool:
    """Whether oneDNN compiles each new shape of a product: ``model`` computes in bfloat16 on a CPU."""
    weight = next(model.parameters())
    return bool(weight.device.type == "cpu" and (autocast or weight.dtype == torch.bfloat16))


def score_dtype(states: Tensor, keys: int) -> torch.dtype:
    """Return the type in which ``attend_float32`` computes scores of ``states`` over ``keys`` tokens."""
    if _is_float32(states.device, keys):
        return torch.float32
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def _is_float32(device: torch.device, keys: int) -> bool:
    return device.type == "cpu" and torch.is_autocast_enabled("cpu") and keys <= LONGEST


def attend_float32(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as ``sdpa`` does, for short sequences in float32.

    ``query`` is [B, H, T, D], ``key`` and ``value`` are [B, K, S, D].
    """
    if _can_multiply(query, key, attention_mask, kwargs):
        return _multiply_rows(query, key, value, attention_mask, kwargs.get("scaling")), None
    if not _is_float32(query.device, key.shape[-2]):
        return _sdpa(module, query, key, value, attention_mask, **kwargs)
    given = {
        name: one.float() if isinstance(one, Tensor) and one.is_floating_point() else one
        for name, one in {"attention_mask": attention_mask, **kwargs}.items()
    }
    with torch.autocast("cpu", enabled=False):
        return _sdpa(module, query.float(), key.float(), value.float(), **given)


def _can_multiply(query: Tensor, key: Tensor, mask: Tensor | None, options: Mapping[str, Any]) -> bool:
    """Whether ``_multiply`` computes this attention as the kernel of torch does, and faster.

    Modules of causal models come here: without a mask they are causal.
    """
    keys = key.shape[2]
    if not products.with_onednn or query.device.type != "cpu" or keys > LONGEST:
        return False
    if score_dtype(query, keys) != torch.float32:
        return False
    if mask is None and (options.get("is_causal") is False or query.shape[2] != keys):
        return False
    return not strange_options({name: one for name, one in options.items() if name != "scaling"})


def _multiply_rows(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Return the attention [B, T, H, D], computed for a few rows at once."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # a block of responses without a token has no scores
    size = max(1, SCORE_CELLS // max(1, query.shape[1:3].numel() * key.shape[2]))
    outputs = []
    with torch.autocast("cpu", enabled=False):
        for start in range(0, len(query), size):
            rows = slice(start, start + size)
            own = mask if mask is None or len(mask) == 1 else mask[rows]
            states = query[rows].float() * scale, key[rows].float(), value[rows].float(), own
            if torch.is_grad_enabled():
                # the backward pass makes the scores again: no layer keeps them
                out = checkpoint(_multiply, *states, use_reentrant=False, preserve_rng_state=False)
            else:
                out = _multiply(*states)
            outputs.append(out)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _multiply(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Return the attention [B, T, H, D] of scaled queries; without ``mask`` a token sees those before it."""
    rows, heads, length, width = query.shape
    shared, seen = key.shape[1:3]
    # heads that share keys are adjacent
    asked = query.reshape(rows, shared, heads // shared * length, width)
    scores = (asked @ key.transpose(-1, -2)).view(rows, heads, length, seen)
    if mask is None:
        mask = torch.ones(length, seen, dtype=torch.bool, device=query.device).tril()
    if mask.dtype == torch.bool:
        # not -inf: a query of padding sees nothing, and the layers after it would read its NaN
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    shares = scores.softmax(dim=-1).view(rows, shared, heads // shared * length, seen)
    return (shares @ value).view(rows, heads, length, value.shape[-1]).transpose(1, 2)


_sdpa: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward


def use_float32_attention(model: Any) -> bool:
    """Replace ``sdpa`` by ``attend_float32`` in ``model``; return False if it uses another attention."""
    if model.config._attn_implementation != "sdpa":
        return False
    model.set_attn_implementation(FLOAT32)
    return True


AttentionInterface.register(FLOAT32, attend_float32)
AttentionMaskInterface.register(FLOAT32, sdpa_mask)
