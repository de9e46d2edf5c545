"""Attention for decoding where all rows of a group share the keys and values of their prompt.

One matrix product computes the group's queries against the prompt; each row's own tokens are separate. The
log-sum-exp of the scores merges both exactly (as in Hydragen, arXiv:2402.05099, and cascade attention).

Axes: ``B`` rows, ``H`` heads, ``K`` key-value heads, ``D`` head width, ``U`` prompts of a bucket, ``P``
tokens of its longest, ``G`` rows of its largest group, ``C`` places for a row's own tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import sdpa_mask

from multitask_rl.attention import products
from multitask_rl.attention.float32 import attend_float32, score_dtype
from multitask_rl.attention.interface import check_options

SHARED_PROMPT = "multitask_rl_shared_prompt"

MARK = "shared_prompt_layer"
"""Attribute of a key tensor: its ``SharedPromptLayer``."""

MOST_EMPTY, MOST_EMPTY_SHARE = 16, 8
"""Empty places of a row: at most 16, or one per 8 tokens if that is more."""
LOG2_E = math.log2(math.e)
PEAK_COLUMNS = 32
"""``amax`` of torch compares blocks of so many columns at once, and the columns of a rest one by one."""


@dataclass(kw_only=True, slots=True)
class Bucket:
    """Prompts of similar length, with ``width`` places for rows of each."""

    bias: Tensor | None
    """[U, 1, 1, P], -inf on the padding; None without padding."""
    prompts: int
    """U"""
    width: int
    """G"""

    @property
    def slots(self) -> int:
        """Number of places for rows."""
        return self.prompts * self.width


class RowGrid:
    """Assigns rows to prompts: every bucket has ``width`` places for each of its prompts."""

    def __init__(self, buckets: list[Bucket], slots: Tensor) -> None:
        self.buckets = buckets
        self.slots = slots
        """[B] place of each row."""
        self.source = slots
        """[all places] the row in each place; row 0 in empty places."""
        self._invert()

    def keep(self, rows: Tensor) -> None:
        """Reduce the batch to ``rows``, in this order."""
        self.slots = self.slots[rows]
        self._invert()

    def drop_ended_prompts(self) -> list[Tensor | None]:
        """Remove prompts without a row and places that no group needs.

        Return per former bucket the indices [U'] of the prompts that stay; None for a removed bucket.
        """
        kept: list[Tensor | None] = []
        buckets, first, base = [], 0, 0
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
        self.buckets, self.slots = buckets, slots
        self._invert()
        return kept

    def _invert(self) -> None:
        total = sum(bucket.slots for bucket in self.buckets)
        self.source = torch.zeros(total, dtype=torch.long, device=self.slots.device)
        self.source[self.slots] = torch.arange(len(self.slots), device=self.slots.device)


class SharedPromptLayer(DynamicLayer):  # type: ignore[misc]
    """Prompts [U, K, P, D] per bucket, and the rows' own tokens [B, K, C, D] in a growing buffer.

    Products read all ``C`` places, because leaving out the empty ones would cost more. Empty places are 0.
    The last place is always empty: ``_attend`` puts the score of the whole prompt there.
    """

    def __init__(self, grid: RowGrid, prompts: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.grid = grid
        self.device = prompts[0][0].device
        # under autocast rotated keys are float32 and the products are not
        self.dtype = score_dtype(prompts[0][0], max(keys.shape[-2] for keys, _ in prompts))
        self.prompts = [(_order_keys(keys.to(self.dtype)), values.to(self.dtype)) for keys, values in prompts]
        self.rows = len(grid.slots)
        self.length = 0
        self.own: tuple[Tensor, Tensor] | None = None
        """Keys and values, each [B, K, C, D]."""
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Return the length of the longest prompt plus the own tokens so far."""
        return max(keys.shape[-2] for keys, _ in self.prompts) + self.length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append one token of every row; return all places [B, K, C, D], marked for the attention.

        The states [B', K, 1, D] of a batch that was filled up have more rows than the cache.
        """
        if self.own is None or self.length == self.own[0].shape[2] - 1:
            places = self.length + 1 + max(MOST_EMPTY, self.length // MOST_EMPTY_SHARE)
            if products.with_onednn:
                places -= places % MOST_EMPTY  # it multiplies numbers of keys like 64 faster than 65
            shape = (self.rows, key_states.shape[1], places, key_states.shape[-1])
            new = key_states.new_empty(shape, dtype=self.dtype)
            columns = new.view(*shape[:2], shape[3], places).mT if _are_columns(new) else new
            grown = columns, torch.empty_like(new)
            for place, states in enumerate(grown):
                if self.own is not None:
                    states[:, :, : self.length] = self.own[place][: self.rows, :, : self.length]
                states[:, :, self.length :] = 0.0
            self.own = grown
        keys, values = (states[: self.rows] for states in self.own)
        keys[:, :, self.length] = key_states[: self.rows, :, 0]
        values[:, :, self.length] = value_states[: self.rows, :, 0]
        self.length += 1
        setattr(keys, MARK, self)
        return keys, values

    def move(self, sources: Tensor, holes: Tensor, remaining: int) -> None:
        """Copy the rows ``sources`` over ``holes`` and keep the first ``remaining``."""
        if len(holes):
            for states in self.own or ():
                states[holes, :, : self.length] = states[sources, :, : self.length]
        self.rows = remaining

    def keep_prompts(self, kept: list[Tensor | None]) -> None:
        """Keep the prompts ``kept`` [U'] of each bucket, as ``RowGrid.drop_ended_prompts`` returns them."""
        self.prompts = [
            (_order_keys(keys[chosen]), values[chosen])
            for (keys, values), chosen in zip(self.prompts, kept, strict=True)
            if chosen is not None
        ]


def _are_columns(keys: Tensor) -> bool:
    """Whether keys [.., T, D] lie in memory as [.., D, T].

    oneDNN multiplies them with queries up to twice as fast so, with the same result.
    """
    return products.with_onednn and keys.device.type == "cpu"


def _order_keys(keys: Tensor) -> Tensor:
    return keys.mT.contiguous().mT if _are_columns(keys) else keys


class SharedPromptCache(Cache):  # type: ignore[misc]
    """The cache of a batch whose rows continue shared ``prompts``: layers x buckets x (keys, values)."""

    def __init__(self, grid: RowGrid, prompts: list[list[tuple[Tensor, Tensor]]]) -> None:
        super().__init__(layers=[SharedPromptLayer(grid, layer) for layer in prompts])
        self.grid = grid

    def keep(self, kept: Tensor) -> Tensor:
        """Drop all rows but ``kept`` (ascending); return them in their new order.

        Rows from the end fill the holes, so few rows are copied.
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
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend to prompt and own tokens (``transformers``' attention interface).

    ``query`` is [B', H, 1, D] with B' >= B: the output of rows beyond the cache is 0. ``key`` and ``value``
    [B, K, C, D] come from ``SharedPromptLayer.update``; with others this is ``attend_float32``.

    Raises:
        NotImplementedError: there is a mask, or see ``check_options``.
    """
    layer: SharedPromptLayer | None = getattr(key, MARK, None)
    if layer is None:
        return attend_float32(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None or query.shape[2] != 1:
        raise NotImplementedError("attention over shared prompts takes no mask")
    scaling: float | None = kwargs.pop("scaling", None)
    check_options(kwargs, "over shared prompts")
    rows = len(key)
    scaled = query[:rows, :, 0] * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    # the cache has the precision to multiply in
    with torch.autocast(query.device.type, enabled=False):
        output = _attend(scaled.to(layer.dtype), key, value, layer)
    if len(query) > rows:
        output = pad(output, (0, 0, 0, 0, 0, len(query) - rows))
    return output.unsqueeze(1), None


def _attend(scaled: Tensor, key: Tensor, value: Tensor, layer: SharedPromptLayer) -> Tensor:
    """Return the output [B, H, D] of the ``scaled`` queries [B, H, D]."""
    rows, heads, size = scaled.shape
    groups = key.shape[1]
    placed = scaled.index_select(0, layer.grid.source)
    outputs, totals = [], []
    first = 0
    for bucket, (keys, values) in zip(layer.grid.buckets, layer.prompts, strict=True):
        queries = placed[first : first + bucket.slots]
        queries = queries.view(bucket.prompts, bucket.width, groups, heads // groups, size).transpose(1, 2)
        scores = (queries.reshape(bucket.prompts, groups, -1, size) @ keys.transpose(-1, -2)).float()
        if bucket.bias is not None:
            scores += bucket.bias
        # by hand: ``softmax`` and ``logsumexp`` would each compute the exponentials
        # powers of 2: on CPUs torch gives those of e to MKL, which is slower on AMD's
        peak = _peak(scores)
        weights = scores.sub_(peak).mul_(LOG2_E).exp2_()
        mass = weights.sum(dim=-1, keepdim=True)
        output = (weights.to(values.dtype) @ values).div_(mass)
        back = (bucket.prompts, groups, bucket.width, -1)
        totals.append(mass.log_().add_(peak).view(back).transpose(1, 2).reshape(bucket.slots, heads))
        outputs.append(output.view(*back, size).transpose(1, 2).reshape(bucket.slots, heads, size))
        first += bucket.slots
    shape = (rows * groups, heads // groups, -1)
    prompt_output = torch.cat(outputs).index_select(0, layer.grid.slots).view(shape)
    scores = torch.bmm(scaled.view(shape), key.flatten(0, 1).transpose(-1, -2)).float()
    # the prompt is one more key: its score is the log-sum-exp, its value the output over the prompt
    scores[..., layer.length : -1] = float("-inf")
    scores[..., -1:] = torch.cat(totals).index_select(0, layer.grid.slots).view(shape)
    weights = scores.softmax(dim=-1).to(value.dtype)
    output = prompt_output.mul_(weights[..., -1:]).baddbmm_(weights, value.flatten(0, 1))
    return output.view(rows, heads, size)


def _peak(scores: Tensor) -> Tensor:
    """Return the largest of ``scores`` [.., P] in whole blocks: [.., 1]. The last two blocks overlap."""
    whole = scores.shape[-1] // PEAK_COLUMNS * PEAK_COLUMNS
    if whole in (0, scores.shape[-1]):
        return scores.amax(dim=-1, keepdim=True)
    parts = scores[..., :whole], scores[..., -PEAK_COLUMNS:]
    return torch.maximum(*(part.amax(dim=-1, keepdim=True) for part in parts))


AttentionInterface.register(SHARED_PROMPT, shared_prompt_attention)
AttentionMaskInterface.register(SHARED_PROMPT, sdpa_mask)
