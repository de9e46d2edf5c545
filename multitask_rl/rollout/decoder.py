"""The model's state over a batch of rows: prompts computed once, next-token logits, a token at a time.

``SharedDecoder`` reads a group's prompt once for all its rows. ``PlainDecoder`` works for every causal
language model: over the cache that ``transformers`` makes or, with another state (Mamba, LFM2), without one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicCache, DynamicLayer

from multitask_rl.attention.float32 import FLOAT32, compiles_shapes
from multitask_rl.attention.interface import use_attention
from multitask_rl.attention.shared import SHARED_PROMPT, Bucket, RowGrid, SharedPromptCache
from multitask_rl.rollout.prefill import prefill

__all__ = ["PlainDecoder", "SharedDecoder", "TokenDecoder", "can_decode_cached", "can_share_prompts"]

logger = logging.getLogger(__name__)

BUCKET_SLACK = 16
"""Tokens by which even the shortest prompt of a bucket may be padded."""
SMALLEST_STEP = 16
"""Rows between the sizes of batches whose products are compiled for each size."""


class TokenDecoder(Protocol):
    """Rows that grow by a token at a time and leave."""

    logits: Tensor
    """[B, V] of the next token."""

    def keep(self, rows: Tensor) -> Tensor:
        """Drop every row but ``rows`` (ascending); return them in their new order."""
        ...

    def advance(self, tokens: Tensor) -> None:
        """Append ``tokens`` [B] and compute the next logits."""
        ...


class SharedDecoder:
    """Rows that continue shared prompts; call under ``use_attention([model], SHARED_PROMPT)``."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], filler: int) -> None:
        device = next(model.parameters()).device
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in enumerate(prompts):
            groups.setdefault(tuple(prompt), []).append(row)
        slots = torch.empty(len(prompts), dtype=torch.long)
        buckets: list[Bucket] = []
        states: list[list[tuple[Tensor, Tensor]]] = []
        logits = []
        first = 0
        for similar in _cut(sorted(groups, key=len)):
            width = max(len(groups[prompt]) for prompt in similar)
            for number, prompt in enumerate(similar):
                rows = groups[prompt]
                slots[rows] = first + number * width + torch.arange(len(rows))
            last, layers, bias = _prefill(model, similar, filler, device)
            logits.append(last.repeat_interleave(width, 0))
            states.append(layers)
            buckets.append(Bucket(bias=bias, prompts=len(similar), width=width))
            first += buckets[-1].slots
        grid = RowGrid(buckets, slots.to(device))
        self._cache = SharedPromptCache(grid, [list(layer) for layer in zip(*states, strict=True)])
        self._position = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
        self._model = model
        self._fills_up = compiles_shapes(model, autocast=torch.is_autocast_enabled(device.type))
        self.logits = torch.cat(logits)[grid.slots]

    def keep(self, rows: Tensor) -> Tensor:
        """Drop every row but ``rows`` (ascending); return them in their new order."""
        order = self._cache.keep(rows)
        self._position = self._position[order]
        return order

    def advance(self, tokens: Tensor) -> None:
        """Append ``tokens`` [B] and compute the next logits."""
        rows = len(tokens)
        empty = round_rows(rows) - rows if self._fills_up else 0
        out = self._model(
            input_ids=pad(tokens, (0, empty)).unsqueeze(-1),
            position_ids=pad(self._position, (0, 0, 0, empty)),
            past_key_values=self._cache,
            use_cache=True,
        )
        self._position = self._position + 1
        self.logits = out.logits[:rows, -1]


def round_rows(rows: int) -> int:
    """Return the next of the few sizes to which a batch is filled up: at most 1/16 more beyond 256 rows."""
    if rows <= SMALLEST_STEP:
        return 1 << (rows - 1).bit_length()
    step = max(SMALLEST_STEP, 1 << (rows.bit_length() - 5))
    return -(-rows // step) * step


def _cut(prompts: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Cut prompts in ascending order of length into buckets of similar length."""
    buckets: list[list[tuple[int, ...]]] = []
    for prompt in prompts:
        if not buckets or len(prompt) > 1.25 * len(buckets[-1][0]) + BUCKET_SLACK:
            buckets.append([])
        buckets[-1].append(prompt)
    return buckets


def _left_padded(
    prompts: Sequence[Sequence[int]], filler: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return ids [U, P] and the mask [U, P], None without padding."""
    width = max(map(len, prompts))
    ids = torch.tensor([[filler] * (width - len(p)) + list(p) for p in prompts], device=device)
    if min(map(len, prompts)) == width:
        return ids, None
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    return ids, (torch.arange(width, device=device) >= width - lengths.unsqueeze(-1)).long()


def _positions(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return the positions [U, P] of left-padded tokens."""
    if mask is not None:
        return (mask.cumsum(-1) - 1).clamp(min=0)
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


def _prefill(
    model: Any, prompts: Sequence[Sequence[int]], filler: int, device: torch.device
) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor | None]:
    """Return the next-token logits [U, V], keys and values of every layer, and the bias of the padding."""
    ids, mask = _left_padded(prompts, filler, device)
    cache = DynamicCache(config=model.config)
    logits = prefill(model, ids, cache, mask=mask, positions=_positions(ids, mask))
    bias = None
    if mask is not None:
        bias = torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask == 0, float("-inf"))
        bias = bias[:, None, None]
    return logits, [(layer.keys, layer.values) for layer in cache.layers], bias


class PlainDecoder:
    """Left-padded rows over ``transformers``' own cache, or recomputed at every token without one."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], filler: int, *, cached: bool) -> None:
        device = next(model.parameters()).device
        unique = list(dict.fromkeys(map(tuple, prompts)))
        numbers = {prompt: row for row, prompt in enumerate(unique)}
        which = torch.tensor([numbers[tuple(p)] for p in prompts], device=device)
        self._model = model
        self._ids, mask = _left_padded(unique, filler, device)
        self._cache: Any = DynamicCache(config=model.config) if cached else None
        self._mask = mask
        self._positions = _positions(self._ids, mask)
        self.logits = (
            prefill(model, self._ids, self._cache, mask=mask, positions=self._positions)
            if cached
            else self._forward(self._ids, self._positions)
        )[which]
        self._ids, self._positions = self._ids[which], self._positions[which]
        self._mask = None if self._mask is None else self._mask[which]
        if self._cache is not None:
            self._cache.batch_select_indices(which)

    def keep(self, rows: Tensor) -> Tensor:
        """Drop every row but ``rows`` (ascending); return them in their new order."""
        self._ids, self._positions = self._ids[rows], self._positions[rows]
        self._mask = None if self._mask is None else self._mask[rows]
        if self._cache is not None:
            self._cache.batch_select_indices(rows)
        return rows

    def advance(self, tokens: Tensor) -> None:
        """Append ``tokens`` [B] and compute the next logits."""
        new = tokens.unsqueeze(-1)
        self._positions = torch.cat([self._positions, self._positions[:, -1:] + 1], dim=-1)
        if self._mask is not None:
            self._mask = torch.cat([self._mask, torch.ones_like(new)], dim=-1)
        if self._cache is None:
            self._ids = torch.cat([self._ids, new], dim=-1)
            self.logits = self._forward(self._ids, self._positions)
        else:
            self.logits = self._forward(new, self._positions[:, -1:])

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        if self._cache is None:
            alone: Tensor = self._model(input_ids=ids, use_cache=False).logits[:, -1]
            return alone
        logits: Tensor = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits


@torch.no_grad()
def can_share_prompts(model: Any) -> bool:
    """Whether ``SharedDecoder`` says of ``model`` what a plain forward says; tried on a few tokens.

    Models with attention windows, with another state than keys and values, or whose attention does not go
    through ``transformers``' interface do not.
    """
    if getattr(model, "_is_stateful", False) or not hasattr(model, "set_attn_implementation"):
        return False
    if model.config._attn_implementation not in ("sdpa", "eager", FLOAT32):
        return False  # chosen by hand, or a model that sdpa does not fit
    layers = DynamicCache(config=model.config).layers
    if not layers or any(type(layer) is not DynamicLayer for layer in layers):
        return False
    sharing = use_attention([model], SHARED_PROMPT)
    problem = _try(model, lambda prompts: SharedDecoder(model, prompts, 0), sharing)
    if problem:
        logger.info("rows decode apart, their prompts are not shared: %s", problem)
    return not problem


@torch.no_grad()
def can_decode_cached(model: Any) -> bool:
    """Whether ``PlainDecoder`` says over a cache what a plain forward says; tried on a few tokens.

    Models with another state than keys and values do not, be it in some layers only (LFM2, Bamba).
    """
    if getattr(model, "_is_stateful", False):
        return False
    problem = _try(model, lambda prompts: PlainDecoder(model, prompts, 0, cached=True), nullcontext())
    if problem:
        logger.warning(
            "%s is sampled without a cache, which is slow: %s", type(model).__name__, problem.splitlines()[0]
        )
    return not problem


def _try(
    model: Any, build: Callable[[list[list[int]]], TokenDecoder], attention: AbstractContextManager[None]
) -> str:
    """Return what is wrong with the decoder that ``build`` makes of prompts under ``attention``, or ''.

    Prompts differ in length, two are the same, and a row leaves on the way.
    """
    size = int(model.config.get_text_config().vocab_size)
    prompts = [[i % size for i in row] for row in ([5, 3, 9, 4], [7, 1], [7, 1])]
    answers = [[i % size for i in row] for row in ([2, 8, 6], [9, 5, 3], [4, 6, 8])]
    found: list[tuple[list[int], Tensor]] = []
    rows = [0, 1, 2]
    try:
        with attention:
            decoder = build(prompts)
            device = decoder.logits.device
            for step in range(3):
                found.append((rows, decoder.logits))
                if step == 1:
                    kept = decoder.keep(torch.tensor([0, 2], device=device))
                    rows = [rows[i] for i in kept.tolist()]
                decoder.advance(torch.tensor([answers[i][step] for i in rows], device=device))
            found.append((rows, decoder.logits))
        whole = torch.stack([_alone(model, p, a, device) for p, a in zip(prompts, answers, strict=True)])
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError, IndexError) as error:
        return str(error) or type(error).__name__
    gaps = [(logits.float() - whole[own, step]).abs().max() for step, (own, logits) in enumerate(found)]
    gap = float(torch.stack(gaps).max() / whole.abs().max().clamp(min=1.0))
    tolerance = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1
    return "" if gap <= tolerance else f"the logits move by {gap:.2g}"


def _alone(model: Any, prompt: list[int], answer: list[int], device: torch.device) -> Tensor:
    """Return the logits after the prompt and after each token of the answer, of one forward."""
    ids = torch.tensor([[*prompt, *answer]], device=device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
    return logits
