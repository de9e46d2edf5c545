"""A group's prompt computed once: samples of similar prompts go through the model as one sequence.

The sequence holds each distinct prompt without its last token (the *prefix*) once, then a row per sample:
last prompt token and response. A row attends to its prefix (``attention/block.py``): values and gradients are
those of separate samples. Source: Prefix Grouper (arXiv:2506.05433).

Axes: ``U`` distinct prompts, ``M`` tokens of the sequence, padding counted, ``N`` response tokens.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from multitask_rl.attention.block import BLOCKS, Block, Blocks, keep_until_backward, mask_of
from multitask_rl.attention.float32 import FLOAT32
from multitask_rl.attention.interface import has_windows, use_attention
from multitask_rl.models.trial import TRIAL_ERRORS, evaluating, trial_ids, trial_tolerance

logger = logging.getLogger(__name__)

BLOCK_CELLS = {"cpu": 8, "cuda": 128}
"""Cost of one more block by kind of device, in tokens of padding; measured on a CPU, estimated on a GPU."""

KEYS_OF_A_CELL = 16
"""Tokens whose copied keys and values take the memory of one token: 2 of its about 32 vectors in a layer."""


@dataclass(kw_only=True)
class SharedPart:
    """Samples as one sequence: shared prefixes, the rows behind them, and samples with prompts of their own.

    Rows leave out the last token, which predicts nothing.
    """

    input_ids: Tensor
    """[1, M]"""
    position_ids: Tensor
    """[1, M] within each sample; padding repeats the row's last."""
    places: Tensor
    """[N] the tokens of the sequence that predict a response token."""
    num_tokens: int
    """M without padding."""
    prefix_lengths: Tensor
    """[U], ascending."""
    prefixes: list[Block]
    """Blocks of [U] rows together."""
    responses: list[Block]

    def to(self, device: torch.device) -> SharedPart:
        """Move the tensors."""
        moved: Any = {name: own.to(device) for name, own in vars(self).items() if isinstance(own, Tensor)}
        rows = [replace(b, prompt=None if b.prompt is None else b.prompt.to(device)) for b in self.responses]
        return replace(self, **moved, responses=rows)


def cut_by_length(lengths: Sequence[int], *, own_cells: int) -> list[slice]:
    """Cut ascending ``lengths`` into chunks with the least total cost.

    A chunk costs its cells (rows times longest row) and ``own_cells``.
    """
    counts = Counter(lengths)
    runs = sorted(counts.items())
    ends = list(itertools.accumulate((count for _, count in runs), initial=0))
    best, start = [0], [0]
    for j in range(1, len(runs) + 1):
        width = runs[j - 1][0]
        cost, cut = best[j - 1] + width * (ends[j] - ends[j - 1]) + own_cells, j - 1
        for i in range(j - 2, -1, -1):
            middle = (i + j) // 2
            # a cut in the middle pays, and pays more for every chunk that starts earlier
            if (width - runs[middle - 1][0]) * (ends[middle] - ends[i]) > own_cells and middle > i:
                break
            candidate = best[i] + width * (ends[j] - ends[i]) + own_cells
            if candidate < cost:
                cost, cut = candidate, i
        best.append(cost)
        start.append(cut)
    cuts: list[slice] = []
    j = len(runs)
    while j:
        cuts.append(slice(ends[start[j]], ends[j]))
        j = start[j]
    return cuts[::-1]


def cut_prompts(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    indices: Sequence[int],
    max_tokens: int,
    block_cells: int,
) -> list[tuple[list[int], int]]:
    """Group samples with the same or similarly long prompts into parts of at most ``max_tokens`` cells.

    Copies of a shared prompt's keys and values (one per row behind it) count, too. A single longer sample is
    a part of its own.

    Returns:
        Of each part the samples, ordered by prompt length, and the cells.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in indices:
        groups.setdefault(tuple(prompts[i]), []).append(i)
    ordered = sorted(groups.items(), key=lambda item: (len(item[0]), item[1][0]))
    parts: list[list[list[int]]] = []
    shortest = 0
    for prompt, own in ordered:
        if not parts or len(prompt) > 2 * shortest + 32:
            parts.append([])
            shortest = len(prompt)
        parts[-1].append(own)

    def count(chosen: Sequence[int]) -> int:
        together, alone = _split(chosen, prompts)
        kinds = (
            [len(p) - 1 for p in {tuple(prompts[i]) for i in together}],
            [len(responses[i]) for i in together],
            [len(prompts[i]) - 1 + len(responses[i]) for i in alone],
        )
        cells: int = sum(
            (cut.stop - cut.start) * lengths[cut.stop - 1]
            for lengths in map(sorted, kinds)
            for cut in cut_by_length(lengths, own_cells=block_cells)
        )
        return cells + sum(len(prompts[i]) - 1 for i in together) // KEYS_OF_A_CELL

    def within(part: list[list[int]]) -> list[tuple[list[int], int]]:
        """Halve ``part``: prompts first, then rows of one prompt."""
        flat = [i for own in part for i in own]
        cells = count(flat)
        if len(flat) == 1 or cells <= max_tokens:
            return [(flat, cells)]
        members = part if len(part) > 1 else [[i] for i in flat]
        half = len(members) // 2
        return within(members[:half]) + within(members[half:])

    return [piece for part in parts for piece in within(part)]


def make_part(
    indices: Sequence[int],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    filler: int,
    block_cells: int,
    sampled: Sequence[Sequence[int] | None] | None = None,
) -> tuple[SharedPart, list[int]]:
    """Return the part of the samples ``indices``, and the order of the samples in its outputs.

    ``sampled``: see ``microbatch.build_microbatches``.
    """
    together, alone = _split(indices, prompts)
    unique = sorted(dict.fromkeys(tuple(prompts[i]) for i in together), key=len)
    numbers = {prompt: row for row, prompt in enumerate(unique)}
    together.sort(key=lambda i: (len(responses[i]), i))
    alone.sort(key=lambda i: (len(prompts[i]) + len(responses[i]), i))
    ids: list[int] = []
    positions: list[int] = []
    places: list[int] = []

    def read(i: int, unread: int = 0) -> Sequence[int]:
        """Return the tokens of sample ``i``'s row that predict a sampled one, ``unread`` tokens before."""
        own = None if sampled is None else sampled[i]
        return range(unread, unread + len(responses[i])) if own is None else [unread + p for p in own]

    def write(rows: Sequence[tuple[Sequence[int], int, Sequence[int]]]) -> int:
        """Append right-padded rows (tokens, first position, tokens that are read); return their width."""
        width = len(rows[-1][0])
        for tokens, start, chosen in rows:
            begin, length = len(ids), len(tokens)
            places.extend([begin + place for place in chosen])
            ids.extend((*tokens, *[filler] * (width - length)))
            last = start + max(length - 1, 0)
            positions.extend((*range(start, start + length), *[last] * (width - length)))
        return width

    # ascending in length
    heads = [(prompt[:-1], 0, ()) for prompt in unique]
    behind = [((prompts[i][-1], *responses[i][:-1]), len(prompts[i]) - 1, read(i)) for i in together]
    whole = [((*prompts[i], *responses[i][:-1]), 0, read(i, len(prompts[i]) - 1)) for i in alone]
    prefixes: list[Block] = []
    answers: list[Block] = []
    for rows in (heads, behind, whole):
        for cut in cut_by_length([len(tokens) for tokens, _, _ in rows], own_cells=block_cells):
            own = [numbers[tuple(prompts[i])] for i in together[cut]] if rows is behind else None
            prompt = None if own is None else torch.tensor(own)
            block = Block(rows=cut.stop - cut.start, width=write(rows[cut]), prompt=prompt)
            (prefixes if rows is heads else answers).append(block)
    part = SharedPart(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        places=torch.tensor(places),
        num_tokens=sum(len(tokens) for tokens, _, _ in (*heads, *behind, *whole)),
        prefix_lengths=torch.tensor([len(p) - 1 for p in unique], dtype=torch.long),
        prefixes=prefixes,
        responses=answers,
    )
    return part, [*together, *alone]


def _split(indices: Sequence[int], prompts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return the samples that share their prompt with another one, and the others."""
    counts = Counter(tuple(prompts[i]) for i in indices)
    together = [i for i in indices if counts[tuple(prompts[i])] > 1]
    return together, [i for i in indices if counts[tuple(prompts[i])] == 1]


def read_shared(
    model: Any,
    parts: Sequence[SharedPart],
    read: Callable[[Any], tuple[Tensor, ...]],
    *,
    want_logits: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """Run ``parts`` through ``model`` and return outputs at all response tokens: [N, ...] each.

    ``model`` is a causal language model or its decoder, and gets ``kwargs``. ``read`` picks tensors
    [1, M or N, ...] from one output; with ``want_logits`` they include logits.
    """
    found: list[tuple[Tensor, ...]] = []
    with use_attention([model], BLOCKS):
        for part in parts:
            blocks = Blocks(part.prefixes, part.prefix_lengths, part.responses)
            # logits of all tokens would be M times the vocabulary
            keep = {"logits_to_keep": part.places} if want_logits else {}
            out = model(
                input_ids=part.input_ids,
                attention_mask=mask_of(blocks, model),
                position_ids=part.position_ids,
                use_cache=False,
                **keep,
                **kwargs,
            )
            outputs = read(out)
            keep_until_backward(blocks, outputs)
            found.append(
                tuple(one[0] if one.shape[1] == len(part.places) else one[0, part.places] for one in outputs)
            )
    return tuple(torch.cat(pieces) for pieces in zip(*found, strict=True))


@torch.no_grad()
def supports_shared_prompts(model: Any) -> bool:
    """Whether ``model`` computes the same logits with a shared prompt as without, tried on a few tokens.

    Models fail that have another state than keys and values (Mamba) or attention windows, or whose attention
    does not go through the interface of ``transformers``.
    """
    can_be_replaced = model.config._attn_implementation in ("sdpa", "eager", FLOAT32, BLOCKS)
    # the trial's few tokens would not show a window
    if getattr(model, "_is_stateful", False) or not can_be_replaced or has_windows(model):
        return False
    # two groups with prompts of two lengths, and a sample with a prompt of its own
    prompts = [trial_ids(model, row) for row in 2 * [[5, 3, 9, 4]] + 2 * [[7, 1]] + [[8, 2, 6]]]
    responses = [trial_ids(model, row) for row in ([2, 8, 6], [9, 5], [4, 6, 8, 3], [1, 7], [3, 9, 4, 5])]
    try:
        device = next(model.parameters()).device
        part, order = make_part(range(5), prompts, responses, 0, BLOCK_CELLS["cuda"])
        with evaluating(model):
            (shared,) = read_shared(model, [part.to(device)], lambda out: (out.logits,), want_logits=True)
            plain = []
            for i in order:
                row = torch.tensor([[*prompts[i], *responses[i]]], device=device)
                out = model(input_ids=row, use_cache=False)
                plain.append(out.logits[0, len(prompts[i]) - 1 : -1].float())
    except TRIAL_ERRORS as error:
        logger.info("prompts of a group are computed per sample: %s", error)
        return False
    whole = torch.cat(plain)
    gap = float((shared.float() - whole).abs().max() / whole.abs().max().clamp(min=1.0))
    if not gap <= trial_tolerance(model):
        logger.info("prompts of a group are computed per sample: a shared prompt moves logits by %.2g", gap)
        return False
    return True
