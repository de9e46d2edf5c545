"""Attention in float32 on CPUs, where computing it in bfloat16 takes longer.

Under autocast the matrix products of a model run in bfloat16. On a CPU those of attention are many and small,
each length of a sequence is a shape that has to be compiled first, and the operands come in float32 anyway
(rotated keys): computed as they are, short sequences take a fraction of the time, and round less. It is
plugged in through ``transformers``' own attention interface; projections stay in the lower precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

__all__ = ["FLOAT32", "LONGEST", "attend_float32", "compiles_shapes", "is_float32", "use_float32_attention"]

FLOAT32 = "multitask_rl_float32"
"""Name of ``attend_float32`` in ``transformers``' attention interface."""

LONGEST = 512
"""Keys per row up to which float32 pays: beyond, the bytes read cost more than the compilation."""


def compiles_shapes(model: Any, *, autocast: bool) -> bool:
    """Whether products of a new shape cost a compilation: those in bfloat16 on a CPU (oneDNN)."""
    weight = next(model.parameters())
    return bool(weight.device.type == "cpu" and (autocast or weight.dtype == torch.bfloat16))


def is_float32(device: torch.device, keys: int) -> bool:
    """Whether attention over ``keys`` tokens is computed in float32 although products are in bfloat16."""
    return device.type == "cpu" and torch.is_autocast_enabled("cpu") and keys <= LONGEST


def attend_float32(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as ``sdpa`` does, in float32 where ``is_float32`` says so.

    Args:
        module: the attention layer.
        query: [B, H, T, D].
        key: [B, K, S, D].
        value: [B, K, S, D].
        attention_mask: see ``sdpa``.
        kwargs: see ``sdpa``.
    """
    if is_float32(query.device, key.shape[-2]):
        with torch.autocast("cpu", enabled=False):
            return _sdpa(
                module,
                query.float(),
                key.float(),
                value.float(),
                _float(attention_mask),
                **{name: _float(given) for name, given in kwargs.items()},
            )
    return _sdpa(module, query, key, value, attention_mask, **kwargs)


_sdpa: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward


def _float(given: Any) -> Any:
    """Return a floating mask or bias in float32, anything else as it is."""
    return given.float() if isinstance(given, Tensor) and given.is_floating_point() else given


def use_float32_attention(model: Any) -> bool:
    """Let ``model`` compute attention by ``attend_float32`` if it uses ``sdpa``; return whether it does."""
    if model.config._attn_implementation != "sdpa":
        return False
    model.set_attn_implementation(FLOAT32)
    return True


AttentionInterface.register(FLOAT32, attend_float32)
AttentionMaskInterface.register(FLOAT32, sdpa_mask)
