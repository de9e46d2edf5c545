"""Attention in float32 on CPUs under autocast, where bfloat16 takes longer for short sequences.

The products of attention are many and small, oneDNN compiles a bfloat16 product for each length, and rotated
keys are float32 anyway. Projections stay in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

FLOAT32 = "multitask_rl_float32"
"""Name of ``attend_float32`` in ``transformers``' attention interface."""

LONGEST = 512
"""Keys per row up to which float32 pays: beyond, the bytes read cost more than the compilation."""


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
    if not _is_float32(query.device, key.shape[-2]):
        return _sdpa(module, query, key, value, attention_mask, **kwargs)
    given = {
        name: one.float() if isinstance(one, Tensor) and one.is_floating_point() else one
        for name, one in {"attention_mask": attention_mask, **kwargs}.items()
    }
    with torch.autocast("cpu", enabled=False):
        return _sdpa(module, query.float(), key.float(), value.float(), **given)


_sdpa: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward


def use_float32_attention(model: Any) -> bool:
    """Replace ``sdpa`` by ``attend_float32`` in ``model``; return False if it uses another attention."""
    if model.config._attn_implementation != "sdpa":
        return False
    model.set_attn_implementation(FLOAT32)
    return True


AttentionInterface.register(FLOAT32, attend_float32)
AttentionMaskInterface.register(FLOAT32, sdpa_mask)
