"""``transformers``' attention interface: each other module of this package registers a function under a name.

``use_attention`` lets models attend by a name; no model code is replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

# Torch prefers cuDNN on Hopper. Its gradient under a mask may be NaN (pytorch/pytorch#196678), and each new
# length takes some 30 ms.
torch.backends.cuda.enable_cudnn_sdp(False)

_HARMLESS = {"position_ids", "use_cache", "cache_position", "is_causal", "output_hidden_states"}
"""Arguments of the interface that do not change causal attention."""


class Peers(Protocol):
    """Processes that compute the same sequences, each a part of every sequence."""

    peers: int
    """Number of processes."""

    @property
    def peer_index(self) -> int:
        """Index of this process."""
        ...

    def gather_peers(self, local: Tensor) -> Tensor:
        """Return ``local`` of every peer: [peers, ...]."""
        ...

    def sum_rows(self, parts: Tensor) -> Tensor:
        """Return this process's row of the sum of all peers' ``parts`` [peers, ...] (reduce-scatter)."""
        ...


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, given: Tensor, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return forth(given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


exchange: Any = _Exchange.apply
"""``exchange(given, forth, back)`` returns ``forth(given)``; its gradient goes through ``back``."""

_peers: list[Peers] = []
"""Innermost last. Not a context variable: checkpointing computes layers in threads of the backward pass."""


@contextlib.contextmanager
def use_attention(models: Sequence[Any], name: str, *, peers: Peers | None = None) -> Iterator[None]:
    """Let ``models`` attend by the implementation ``name``, then restore their former one.

    ``name`` is ``BLOCKS``, ``SHARED_PROMPT`` or ``CONTEXT``, which needs ``peers``. With gradient
    checkpointing the context must include the backward pass, which computes layers again.
    """
    before = [(model, own) for model in models if (own := model.config._attn_implementation) != name]
    if peers is not None:
        _peers.append(peers)
    try:
        for model, _ in before:
            model.set_attn_implementation(name)
        yield
    finally:
        if peers is not None:
            _peers.pop()
        for model, own in before:
            model.set_attn_implementation(own)


def has_windows(model: Any) -> bool:
    """Whether a layer of ``model`` attends to fewer than all earlier tokens, as through a window."""
    config = model.config.get_text_config()
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return bool(windowed) or kinds != {"full_attention"}


def current_peers() -> Peers:
    """Return the peers of the innermost ``use_attention``."""
    return _peers[-1]


def strange_options(options: Mapping[str, Any]) -> list[str]:
    """Return the names of ``options`` of the attention interface that would change the result.

    A window, capped scores, sinks and dropout do.
    """
    given = {name: one for name, one in options.items() if name not in _HARMLESS}
    return [name for name, one in given.items() if isinstance(one, Tensor) or one]


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Refuse ``options`` of the attention interface that would change the result.

    Raises:
        NotImplementedError: there are ``strange_options``.
    """
    if strange := strange_options(options):
        raise NotImplementedError(f"attention with {', '.join(strange)} {where}")
