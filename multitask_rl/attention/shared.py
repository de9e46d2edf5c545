"""Decoding with a group's prompt read once: attention over it for all rows of the group together.

The keys and values of a prompt are kept once, whatever the size of its group. The queries of the group's rows
go against them in one matrix product, each row's own tokens apart, and the two are merged exactly by their
log-sum-exp (as in Hydragen, arXiv:2402.05099, and cascade attention). It is plugged in through
``transformers``' own attention interface, so no model code is replaced.

Axes: ``B`` rows, ``H`` heads, ``K`` key-value heads, ``D`` head width, ``U`` prompts of a bucket, ``P``
tokens of its longest, ``G`` rows of its largest group, ``C`` places for a row's own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import sdpa_mask

from multitask_rl.attention.float32 import attend_float32, is_float32
from multitask_rl.attention.interface import check_options

__all__ = [
    "SHARED_PROMPT",
    "Bucket",
    "RowGrid",
    "SharedPromptCache",
    "shared_prompt_attention",
]

SHARED_PROMPT = "multitask_rl_shared_prompt"

MARK = "shared_prompt_layer"
"""Attribute of a key tensor: the layer whose prompts its rows continue."""

MOST_EMPTY, MOST_EMPTY_SHARE = 16, 8
"""Empty places of a row: at most so many, or one for so many tokens."""


@dataclass(kw_only=True, slots=True)
class Bucket:
    """Prompts of similar length."""

    bias: Tensor | None
    """[U, 1, 1, P] -inf on the padding; None without padding."""
    prompts: int
    """U"""
    width: int
    """G"""

    @property
    def slots(self) -> int:
        """Places for rows."""
        return self.prompts * self.width


class RowGrid:
    """Which row belongs to which prompt: buckets x prompts x places, and the rows in them."""

    def __init__(self, buckets: list[Bucket], slots: Tensor) -> None:
        self.buckets = buckets
        self.slots = slots
        """[B] place of each row."""
        self.source = slots
        """[all places] the row in each place; any row where there is none."""
        self._invert()

    def keep(self, rows: Tensor) -> None:
        """The batch is now ``rows`` of the old one, in this order."""
        self.slots = self.slots[rows]
        self._invert()

    def drop_ended_prompts(self) -> list[Tensor | None]:
        """Leave out the prompts that have no row any more and the places that no group needs.

        Returns:
            Per bucket of before the indices [U'] of the prompts that stay; None for a bucket that goes.
        """
        kept: list[Tensor | None] = []
        buckets, parts, first, base = [], [], 0, 0
        slots = torch.empty_like(self.slots)
        for bucket in self.buckets:
            inside = (self.slots >= first) & (self.slots < first + bucket.slots)
            prompts = (self.slots[inside] - first) // bucket.width
            first += bucket.slots
            if not len(prompts):
                kept.append(None)
                continue
            alive, number, counts = torch.unique(prompts, return_inverse=True, return_counts=True)
            width = int(counts.max())
            order = number.argsort(stable=True)
            place = torch.empty_like(number)
            place[order] = (
                torch.arange(len(number), device=number.device) - ((counts.cumsum(0) - counts)[number[order]])
            )
            slots[inside] = base + number * width + place
            bias = None if bucket.bias is None else bucket.bias[alive]
            buckets.append(Bucket(bias=bias, prompts=len(alive), width=width))
            base += buckets[-1].slots
            kept.append(alive)
            parts.append(alive)
        self.buckets, self.slots = buckets, slots
        self._invert()
        return kept

    def _invert(self) -> None:
        total = sum(bucket.slots for bucket in self.buckets)
        self.source = torch.zeros(total, dtype=torch.long, device=self.slots.device)
        self.source[self.slots] = torch.arange(len(self.slots), device=self.slots.device)


class SharedPromptLayer(DynamicLayer):  # type: ignore[misc]
    """Prompts [U, K, P, D] per bucket, and the rows' own tokens [B, K, C, D] in growing buffers.

    ``C`` places are read whole, 0 where there is no token yet: leaving out the empty ones would interrupt the
    stream of memory at every row, which costs more than the products over them. The last place stays empty:
    its score is that of the whole prompt (see ``_attend``).
    """

    def __init__(self, grid: RowGrid, prompts: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.grid = grid
        self.device = prompts[0][0].device
        self.dtype = _precision(prompts)
        self.prompts = [(keys.to(self.dtype), values.to(self.dtype)) for keys, values in prompts]
        self.rows = len(grid.slots)
        self.length = 0
        self._own: Tensor | None = None
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Return the longest prompt and the own tokens so far."""
        return max(keys.shape[-2] for keys, _ in self.prompts) + self.length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append one token of every row; return all places [B, K, C, D], marked for the attention.

        States [B', K, 1, D] of a batch that was filled up may have more rows than the cache.
        """
        own = self._room(key_states)
        own[0, : self.rows, :, self.length] = key_states[: self.rows, :, 0]
        own[1, : self.rows, :, self.length] = value_states[: self.rows, :, 0]
        self.length += 1
        keys, values = own[0, : self.rows], own[1, : self.rows]
        setattr(keys, MARK, self)
        return keys, values

    def move(self, sources: Tensor, holes: Tensor, remaining: int) -> None:
        """Copy the rows ``sources`` over ``holes`` and keep the first ``remaining``."""
        if len(holes) and self._own is not None:
            self._own[:, holes, :, : self.length] = self._own[:, sources, :, : self.length]
        self.rows = remaining

    def keep_prompts(self, kept: list[Tensor | None]) -> None:
        """See ``RowGrid.drop_ended_prompts``."""
        self.prompts = [
            (keys[chosen], values[chosen])
            for (keys, values), chosen in zip(self.prompts, kept, strict=True)
            if chosen is not None
        ]

    def _room(self, states: Tensor) -> Tensor:
        """Return the buffer [2, B, K, C, D] with room for another token."""
        if self._own is None or self.length == self._own.shape[3] - 1:
            places = self.length + 1 + max(MOST_EMPTY, self.length // MOST_EMPTY_SHARE)
            shape = (2, self.rows, states.shape[1], places, states.shape[-1])
            grown = torch.empty(shape, dtype=self.dtype, device=states.device)
            if self._own is not None:
                grown[:, :, :, : self.length] = self._own[:, : self.rows, :, : self.length]
            grown[:, :, :, self.length :] = 0.0
            self._own = grown
        return self._own


def _precision(prompts: list[tuple[Tensor, Tensor]]) -> torch.dtype:
    """Return the type to multiply queries, keys and values in.

    Under autocast rotated keys come in float32, but are multiplied in the lower precision, where that pays.
    """
    keys = prompts[0][0]
    if not torch.is_autocast_enabled(keys.device.type):
        return keys.dtype
    if is_float32(keys.device, max(k.shape[-2] for k, _ in prompts)):
        return torch.float32
    return torch.get_autocast_dtype(keys.device.type)


class SharedPromptCache(Cache):  # type: ignore[misc]
    """The cache of a batch whose rows continue shared prompts."""

    def __init__(self, grid: RowGrid, prompts: list[list[tuple[Tensor, Tensor]]]) -> None:
        """Take ``prompts``: layers x buckets x (keys, values)."""
        super().__init__(layers=[SharedPromptLayer(grid, layer) for layer in prompts])
        self.grid = grid

    def keep(self, kept: Tensor) -> Tensor:
        """Drop all rows but ``kept`` (ascending); return them in their new order.

        Holes are filled from the end instead of copying all rows.
        """
        total, remaining = len(self.grid.slots), len(kept)
        order = torch.arange(total, device=kept.device)
        is_kept = torch.zeros(total, dtype=torch.bool, device=kept.device)
        is_kept[kept] = True
        holes = (~is_kept[:remaining]).nonzero().squeeze(-1)
        sources = is_kept[remaining:].nonzero().squeeze(-1) + remaining
        order[holes] = sources
        order = order[:remaining]
        for layer in self.layers:
            layer.move(sources, holes, remaining)
        self.grid.keep(order)
        if 2 * remaining < len(self.grid.source):
            chosen = self.grid.drop_ended_prompts()
            for layer in self.layers:
                layer.keep_prompts(chosen)
        return order


def shared_prompt_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to prompt and own tokens; an implementation of ``transformers``' attention interface.

    Args:
        module: the attention layer.
        query: [B', H, 1, D], B' >= B: the output of rows that the cache does not have is 0.
        key: [B, K, C, D] as ``SharedPromptLayer.update`` returns it; any other goes to ``sdpa``.
        value: the same.
        attention_mask: not for keys with shared prompts.
        scaling: factor of the scores; default D ** -0.5.
        kwargs: only what changes nothing, see ``check_options``.

    Raises:
        NotImplementedError: the layer wants something more, such as capped scores or sinks.
    """
    layer: SharedPromptLayer | None = getattr(key, MARK, None)
    if layer is None:
        return attend_float32(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if attention_mask is not None or query.shape[2] != 1:
        raise NotImplementedError("attention with a mask over shared prompts")
    check_options(kwargs, "over shared prompts")
    rows = len(key)
    scaled = query[:rows, :, 0] * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    # the cache has the precision to multiply in
    with torch.autocast(query.device.type, enabled=False):
        output = _attend(scaled.to(layer.dtype), key, value, layer)
    return pad(output, (0, 0, 0, 0, 0, len(query) - rows)).unsqueeze(1), None


def _attend(scaled: Tensor, key: Tensor, value: Tensor, layer: SharedPromptLayer) -> Tensor:
    """Return the output [B, H, D] over the prompts and the rows' own tokens."""
    rows, heads, size = scaled.shape
    groups = key.shape[1]
    prompt_output, prompt_total = _attend_to_prompts(scaled, layer)
    shape = (rows * groups, heads // groups, -1)
    scores = torch.bmm(scaled.view(shape), key.flatten(0, 1).transpose(-1, -2)).float()
    # the prompt takes part as one more key, whose score is its log-sum-exp and whose value its output
    scores[..., layer.length : -1] = float("-inf")
    scores[..., -1:] = prompt_total.view(shape)
    weights = scores.softmax(dim=-1).to(value.dtype)
    output = torch.baddbmm(prompt_output.view(shape) * weights[..., -1:], weights, value.flatten(0, 1))
    return output.view(rows, heads, size)


def _attend_to_prompts(scaled: Tensor, layer: SharedPromptLayer) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, D] over the prompts and the log-sum-exp of the scores [B, H]."""
    _, heads, size = scaled.shape
    grid = layer.grid
    placed = scaled[grid.source]
    outputs, totals = [], []
    first = 0
    for bucket, (keys, values) in zip(grid.buckets, layer.prompts, strict=True):
        groups = keys.shape[1]
        shape = (bucket.prompts, bucket.width, groups, heads // groups)
        queries = placed[first : first + bucket.slots].view(*shape, size).transpose(1, 2)
        scores = (queries.reshape(shape[0], groups, -1, size) @ keys.transpose(-1, -2)).float()
        if bucket.bias is not None:
            scores += bucket.bias
        # by hand: ``softmax`` and ``logsumexp`` would each take exponentials of their own
        peak = scores.amax(dim=-1, keepdim=True)
        weights = scores.sub_(peak).exp_()
        mass = weights.sum(dim=-1, keepdim=True)
        output = (weights.to(values.dtype) @ values).div_(mass)
        back = (shape[0], groups, bucket.width, -1)
        totals.append(mass.log_().add_(peak).view(back).transpose(1, 2).reshape(bucket.slots, heads))
        outputs.append(output.view(*back, size).transpose(1, 2).reshape(bucket.slots, heads, size))
        first += bucket.slots
    return torch.cat(outputs)[grid.slots], torch.cat(totals)[grid.slots]


AttentionInterface.register(SHARED_PROMPT, shared_prompt_attention)
AttentionMaskInterface.register(SHARED_PROMPT, sdpa_mask)
