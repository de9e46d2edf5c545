"""Decoding of a batch of rows with ``transformers``: prompts are computed once, then one token at a time.

``SharedDecoder`` reads a group's prompt once for all its rows, and computes once what many prompts begin
with, such as a system prompt. ``PlainDecoder`` works for every causal language model: over the model's cache,
or without one where that gives other logits (Mamba).
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from multitask_rl.attention.float32 import FLOAT32, compiles_shapes
from multitask_rl.attention.interface import use_attention
from multitask_rl.attention.shared import SHARED_PROMPT, Bucket, RowGrid, SharedPromptCache
from multitask_rl.models.trial import TRIAL_ERRORS, trial_ids, trial_tolerance

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 8192
"""Prompt tokens of one forward: enough to fill the machine, few enough to bound its activations."""
MASK_CELLS = 2**25
"""Queries times keys of a forward after the first, whose mask is a tensor: 128 MiB in float32."""
BUCKET_SLACK = 16
"""Tokens by which even the shortest prompt of a bucket may be padded."""
WORTHWHILE_TOKENS = {"cpu": 256}
"""Least prompt tokens that a shared beginning must save to be computed apart; else ``CHUNK_TOKENS``."""
SMALLEST_STEP = 8
"""Least difference between the sizes that batches are filled up to."""


@dataclass(frozen=True, slots=True)
class Past:
    """Tokens whose keys and values are known."""

    ids: tuple[int, ...]
    """[T]"""
    layers: list[Tensor]
    """[layers] keys and values, [2, K, T, D]."""

    def shared(self, prompt: tuple[int, ...]) -> int:
        """Return how many of the first tokens of ``prompt`` are known.

        Its last token does not count: it is computed for the next logits.
        """
        most = min(len(self.ids), len(prompt) - 1)
        if self.ids[:most] == prompt[:most]:
            return most
        return next(i for i in range(most) if self.ids[i] != prompt[i])


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """Return ``cache`` as ``model``'s keyword: ``past_key_values``, from transformers 5.24 on ``cache``."""
    # a model in adapters hides its forward
    named = _forward_arguments(type(model.get_decoder()))  # type: ignore[arg-type]
    return {"cache" if "cache" in named else "past_key_values": cache}


@functools.cache
def _forward_arguments(model_class: Any) -> Collection[str]:
    return inspect.signature(model_class.forward).parameters


def prefill(
    model: Any, ids: Tensor, cache: Any, mask: Tensor | None, positions: Tensor, chunk_tokens: int
) -> Tensor:
    """Compute prompts into ``cache`` in forwards of at most ``chunk_tokens``; return the next logits [U, V].

    The result is that of one forward: a token sees the chunks before through the cache.

    Args:
        model: causal language model of ``transformers``.
        ids: [U, P], left-padded.
        cache: filled in place; it may hold the first columns, fewer than P.
        mask: [U, P] with 0 on the padding; None without padding.
        positions: [U, P].
        chunk_tokens: of one forward, over all rows; a single column is always computed, and all columns for a
            model that ``is_recurrent``.
    """
    rows, width = ids.shape
    size = max(1, chunk_tokens // rows)
    logits = ids.new_empty(0)
    if is_recurrent(model):  # its layers would begin anew with each forward of several tokens
        start, size = 0, width
    else:
        start = int(cache.get_seq_length())
    while start < width:
        end = min(start + size, width)
        if start:
            end = min(end, start + max(1, MASK_CELLS // (rows * end)))
        out = model(
            input_ids=ids[:, start:end],
            attention_mask=None if mask is None else mask[:, :end],
            position_ids=positions[:, start:end],
            **cache_argument(model, cache),
            use_cache=True,
            logits_to_keep=1,
        )
        logits = out.logits[:, -1]
        start = end
    return logits


def _left_padded(
    prompts: Sequence[Sequence[int]], filler: int, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return ids, mask (None without padding) and positions, each [U, P]."""
    width = max(map(len, prompts))
    ids = torch.tensor([[filler] * (width - len(p)) + list(p) for p in prompts], device=device)
    columns = torch.arange(width, device=device)
    if min(map(len, prompts)) == width:
        return ids, None, columns.expand_as(ids)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    mask = (columns >= width - lengths.unsqueeze(-1)).long()
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


class SharedDecoder:
    """Rows that continue shared prompts; call under ``use_attention([model], SHARED_PROMPT)``.

    Args:
        model: causal language model of ``transformers``.
        prompts: of each row.
        filler: id of the padding.
        prefill_tokens: see ``prefill``.
        pasts: what is known of the prompts of some rows.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        filler: int,
        prefill_tokens: int = CHUNK_TOKENS,
        pasts: Mapping[int, Past] = MappingProxyType({}),
    ) -> None:
        device = next(model.parameters()).device
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in enumerate(prompts):
            groups.setdefault(tuple(prompt), []).append(row)
        # a bucket computes as many columns as the prompt of which the least is known needs
        known = {}
        for row, past in pasts.items():
            prompt = tuple(prompts[row])
            if 2 * past.shared(prompt) > len(prompt):
                known[prompt] = past
        # prompts of similar length share a bucket
        cut: list[list[tuple[int, ...]]] = []
        for prompt in sorted(groups, key=lambda prompt: (prompt in known, len(prompt))):
            similar = cut[-1] if cut else []
            is_longer = bool(similar) and len(prompt) > 1.25 * len(similar[0]) + BUCKET_SLACK
            if not similar or is_longer or (prompt in known) != (similar[0] in known):
                cut.append([])
            cut[-1].append(prompt)
        self.num_tokens = sum(map(len, groups))
        """Number of tokens of the distinct prompts."""
        self.num_known = self.num_tokens
        """Of these tokens, those known from an earlier turn or another prompt."""
        prefix = Past((), [])
        slots = torch.empty(len(prompts), dtype=torch.long)
        buckets: list[Bucket] = []
        states: list[list[tuple[Tensor, Tensor]]] = []
        logits = []
        first = 0
        for similar in cut:
            width = max(len(groups[prompt]) for prompt in similar)
            for number, prompt in enumerate(similar):
                rows = groups[prompt]
                slots[rows] = first + number * width + torch.arange(len(rows))
            ids, mask, positions = _left_padded(similar, filler, device)
            cache = DynamicCache(config=model.config)
            if similar[0] not in known:
                found = _common_prefix(model, similar, prefix, prefill_tokens)
                self.num_known -= len(found.ids) if found is not prefix else 0
                prefix = found
            before = [known.get(prompt, prefix) for prompt in similar]
            missing = [len(p) - past.shared(p) for p, past in zip(similar, before, strict=True)]
            start = max(map(len, similar)) - max(missing)
            if start:
                _put(cache, similar, before, start)
            self.num_known -= sum(min(len(p), max(missing)) for p in similar)
            last = prefill(model, ids, cache, mask, positions, prefill_tokens)
            bias = None
            if mask is not None:
                bias = torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask == 0, float("-inf"))
                bias = bias[:, None, None]
            logits.append(last.repeat_interleave(width, 0))
            states.append([(layer.keys, layer.values) for layer in cache.layers])
            buckets.append(Bucket(bias=bias, prompts=len(similar), width=width))
            first += buckets[-1].slots
        grid = RowGrid(buckets, slots.to(device))
        self._cache = SharedPromptCache(grid, [list(layer) for layer in zip(*states, strict=True)])
        self._position = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
        self._model = model
        self._fills_up = compiles_shapes(model, autocast=torch.is_autocast_enabled(device.type))
        self.logits = torch.cat(logits)[grid.slots]
        """[B, V] of the next token."""

    def known(self, row: int) -> list[Tensor]:
        """Return what ``Past.layers`` has for the prompt of a row and the tokens appended to it."""
        grid, length = self._cache.grid, self._cache.layers[0].length
        place, bucket = int(grid.slots[row]), 0
        while place >= grid.buckets[bucket].slots:
            place -= grid.buckets[bucket].slots
            bucket += 1
        prompt, size = place // grid.buckets[bucket].width, int(self._position[row]) - length
        layers = []
        for layer in self._cache.layers:
            before = torch.stack([states[prompt, :, -size:] for states in layer.prompts[bucket]])
            own = (
                torch.stack([states[row, :, :length] for states in layer.own])
                if layer.own
                else before[:, :, :0]
            )
            layers.append(torch.cat([before, own], dim=2))
        return layers

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
            **cache_argument(self._model, self._cache),
            use_cache=True,
        )
        self._position = self._position + 1
        self.logits = out.logits[:rows, -1]


def _common_prefix(model: Any, prompts: Sequence[tuple[int, ...]], before: Past, prefill_tokens: int) -> Past:
    """Compute the longest prefix of all ``prompts`` and return it; ``before`` where that saves too little."""
    ids = prompts[0][: min(map(Past(prompts[0], []).shared, prompts))]
    saved = (len(prompts) - 1) * (len(ids) - min(map(before.shared, prompts)))
    device = next(model.parameters()).device
    if saved < WORTHWHILE_TOKENS.get(device.type, CHUNK_TOKENS):
        return before
    cache = DynamicCache(config=model.config)
    tokens, mask, positions = _left_padded([ids], 0, device)
    prefill(model, tokens, cache, mask, positions, prefill_tokens)
    return Past(ids, [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])


def _put(cache: Any, prompts: Sequence[tuple[int, ...]], pasts: Sequence[Past], start: int) -> None:
    """Put the first ``start`` columns of left-padded prompts into the empty ``cache``."""
    width = max(map(len, prompts))
    for number, (first, *_) in enumerate(zip(*(past.layers for past in pasts), strict=True)):
        filled = first.new_zeros(2, len(prompts), first.shape[1], start, first.shape[3])
        for row, (prompt, past) in enumerate(zip(prompts, pasts, strict=True)):
            padding = width - len(prompt)
            if start > padding:
                filled[:, row, :, padding:] = past.layers[number][:, :, : start - padding]
        cache.update(filled[0], filled[1], number)


def round_rows(rows: int) -> int:
    """Return the size that a batch of ``rows`` rows is filled up to; above 256 it is at most 1/16 larger."""
    if rows <= SMALLEST_STEP:
        return 1 << (rows - 1).bit_length()
    step = max(SMALLEST_STEP, (1 << rows.bit_length()) // 32)
    return -(-rows // step) * step


class PlainDecoder:
    """Left-padded rows over ``transformers``' own cache, or computed again at every token without one.

    Rows of a model that ``is_recurrent`` are equally long: padding would change its states.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        filler: int,
        prefill_tokens: int = CHUNK_TOKENS,
        *,
        cached: bool,
    ) -> None:
        device = next(model.parameters()).device
        unique = list(dict.fromkeys(map(tuple, prompts)))
        numbers = {prompt: row for row, prompt in enumerate(unique)}
        which = torch.tensor([numbers[tuple(p)] for p in prompts], device=device)
        self.num_tokens = sum(map(len, unique))
        self._model = model
        self._ids, self._mask, self._positions = _left_padded(unique, filler, device)
        self._cache: Any = DynamicCache(config=model.config) if cached else None
        logits: Tensor = (
            prefill(model, self._ids, self._cache, self._mask, self._positions, prefill_tokens)
            if cached
            else model(input_ids=self._ids, use_cache=False).logits[:, -1]
        )
        self.logits = logits[which]
        """[B, V] of the next token."""
        self.keep(which)

    def keep(self, rows: Tensor) -> Tensor:
        """Drop every row but ``rows`` (ascending); return them in their new order."""
        self._ids, self._positions = self._ids[rows], self._positions[rows]
        self._mask = None if self._mask is None else self._mask[rows]
        if self._cache is not None:
            self._cache.reorder_cache(rows)  # of all layers; recurrent ones lack ``batch_select_indices``
        return rows

    def advance(self, tokens: Tensor) -> None:
        """Append ``tokens`` [B] and compute the next logits."""
        new = tokens.unsqueeze(-1)
        if self._cache is None:
            self._ids = torch.cat([self._ids, new], dim=-1)
            self.logits = self._model(input_ids=self._ids, use_cache=False).logits[:, -1]
            return
        self._positions = self._positions[:, -1:] + 1
        if self._mask is not None:
            self._mask = torch.cat([self._mask, torch.ones_like(new)], dim=-1)
        self.logits = self._model(
            input_ids=new,
            attention_mask=self._mask,
            position_ids=self._positions,
            **cache_argument(self._model, self._cache),
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]


TokenDecoder = SharedDecoder | PlainDecoder


def is_recurrent(model: Any) -> bool:
    """Whether layers of ``model`` keep a state that each token changes (Mamba, Qwen3.5, LFM2)."""
    kept = DynamicCache(config=model.config).layers
    has_states = not all(isinstance(layer, CacheLayerMixin) for layer in kept)
    return has_states or bool(getattr(model, "_is_stateful", False))


@torch.no_grad()
def can_share_prompts(model: Any) -> bool:
    """Whether ``SharedDecoder`` gives the logits of a plain forward; tried on a few tokens.

    False for models with attention windows, with another state than keys and values, or whose attention does
    not go through ``transformers``' interface.
    """
    if is_recurrent(model) or not hasattr(model, "set_attn_implementation"):
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
    """Whether ``PlainDecoder`` over a cache gives the logits of a plain forward; tried on a few tokens.

    False for some models of which no layer has keys and values (Mamba).
    """
    problem = _try(model, lambda prompts: PlainDecoder(model, prompts, 0, cached=True), nullcontext())
    if problem:
        logger.warning(
            "%s is sampled without a cache, which is slow: %s", type(model).__name__, problem.splitlines()[0]
        )
    return not problem


def _try(
    model: Any, build: Callable[[list[list[int]]], TokenDecoder], attention: AbstractContextManager[None]
) -> str:
    """Return why the decoder that ``build`` makes under ``attention`` differs from a plain forward, or ''.

    The prompts differ in length where they may, two are equal, and one row leaves after the first token.
    """
    short = [7, 1, 8, 2] if is_recurrent(model) else [7, 1]
    prompts = [trial_ids(model, row) for row in ([5, 3, 9, 4], short, short)]
    answers = [trial_ids(model, row) for row in ([2, 8, 6], [9, 5, 3], [4, 6, 8])]
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
        alone = []
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([[*prompt, *answer]], device=device)
            alone.append(model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float())
    except TRIAL_ERRORS as error:
        return str(error) or type(error).__name__
    whole = torch.stack(alone)
    gaps = [(logits.float() - whole[own, step]).abs().max() for step, (own, logits) in enumerate(found)]
    gap = float(torch.stack(gaps).max() / whole.abs().max().clamp(min=1.0))
    return "" if gap <= trial_tolerance(model) else f"the logits move by {gap:.2g}"
