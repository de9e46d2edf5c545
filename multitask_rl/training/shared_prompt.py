"""A group's prompt computed once: samples of similar prompts go through the model as one sequence.

A prompt without its last token (the *prefix*) stands in it once per distinct prompt; a row for each sample
holds the last prompt token and the response, and attends to the prefix as if it stood before it (see
``attention/block.py``). Every token sees exactly what it would see in a row of its own, so values and
gradients are the same. (The idea is Prefix Grouper's, arXiv:2506.05433.)

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

from multitask_rl.attention.block import (
    BLOCKS,
    Block,
    Blocks,
    can_attend_in_blocks,
    keep_until_backward,
    mask_of,
)
from multitask_rl.attention.interface import has_windows, use_attention
from multitask_rl.models.modes import evaluating

__all__ = [
    "BLOCK_CELLS",
    "SharedPart",
    "cut_by_length",
    "cut_prompts",
    "make_part",
    "read_shared",
    "supports_shared_prompts",
]

logger = logging.getLogger(__name__)

BLOCK_CELLS = {"cpu": 8, "cuda": 128}
"""What a block of its own costs on a kind of device, in tokens of padding: more blocks, less padding.

Measured on a CPU; on a GPU the time of a few dozen launches a layer, estimated.
"""

KEYS_OF_A_CELL = 16
"""Copied keys and values that take the memory of a token: 2 of about 32 vectors that a layer keeps of it."""


@dataclass(kw_only=True, slots=True)
class SharedPart:
    """Samples as one sequence.

    Prefixes that several samples have; for each of these a row of the last prompt token and the response; and
    the samples whose prompt no other has, in whole rows. Rows leave out the last token: it predicts nothing.
    """

    input_ids: Tensor
    """[1, M]"""
    position_ids: Tensor
    """[1, M], within each row's own; that of padding is the row's last."""
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
        return SharedPart(
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            places=self.places.to(device),
            num_tokens=self.num_tokens,
            prefix_lengths=self.prefix_lengths.to(device),
            prefixes=self.prefixes,
            responses=[
                replace(b, prompt=None if b.prompt is None else b.prompt.to(device)) for b in self.responses
            ],
        )

    @property
    def num_cells(self) -> int:
        """Tokens computed, padding counted."""
        return self.input_ids.numel()

    @property
    def budget(self) -> int:
        """What it takes of the token budget of a micro-batch."""
        copied = sum(int(self.prefix_lengths[b.prompt].sum()) for b in self.responses if b.prompt is not None)
        return self.num_cells + copied // KEYS_OF_A_CELL


def cut_by_length(lengths: Sequence[int], *, own_cells: int) -> list[int]:
    """Return the sizes of the chunks into which ascending ``lengths`` are cut at the least total cost.

    A chunk costs its cells (rows times longest row) and ``own_cells`` for being one of its own.
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
            # another cut there would pay, and all the more for every chunk that starts earlier
            if (width - runs[middle - 1][0]) * (ends[middle] - ends[i]) > own_cells and middle > i:
                break
            candidate = best[i] + width * (ends[j] - ends[i]) + own_cells
            if candidate < cost:
                cost, cut = candidate, i
        best.append(cost)
        start.append(cut)
    sizes: list[int] = []
    j = len(runs)
    while j:
        sizes.append(ends[j] - ends[start[j]])
        j = start[j]
    return sizes[::-1]


def cut_prompts(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    indices: Sequence[int],
    max_tokens: int,
    block_cells: int,
) -> list[list[int]]:
    """Group samples of the same and of similarly long prompts, at most ``max_tokens`` cells a part.

    The keys and values of a shared prompt are copied for every row behind it, and count as well.

    Returns:
        Samples of each part, ordered by prompt length; a single longer sample is a part of its own.
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
        cells = sum(_padded_cells(sorted(lengths), block_cells) for lengths in kinds)
        return cells + sum(len(prompts[i]) - 1 for i in together) // KEYS_OF_A_CELL

    return [piece for part in parts for piece in _within(part, count, max_tokens)]


def _within(part: list[list[int]], count: Callable[[Sequence[int]], int], limit: int) -> list[list[int]]:
    """Halve ``part`` (prompts first, then the rows of one prompt) until each piece counts ``limit`` cells."""
    flat = [i for own in part for i in own]
    if len(flat) == 1 or count(flat) <= limit:
        return [flat]
    if len(part) == 1:
        half = len(flat) // 2
        halves = [[flat[:half]], [flat[half:]]]
    else:
        half = len(part) // 2
        halves = [part[:half], part[half:]]
    return [piece for h in halves for piece in _within(h, count, limit)]


def _padded_cells(lengths: Sequence[int], block_cells: int) -> int:
    """Return the cells of the blocks that ascending ``lengths`` are cut into."""
    return sum((cut.stop - cut.start) * lengths[cut.stop - 1] for cut in _cut(lengths, block_cells))


def make_part(
    indices: Sequence[int],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    filler: int,
    block_cells: int,
) -> tuple[SharedPart, list[int]]:
    """Return the part of the samples ``indices`` and the order in which their tokens come out of it."""
    together, alone = _split(indices, prompts)
    unique = sorted(dict.fromkeys(tuple(prompts[i]) for i in together), key=len)
    numbers = {prompt: row for row, prompt in enumerate(unique)}
    together.sort(key=lambda i: (len(responses[i]), i))
    alone.sort(key=lambda i: (len(prompts[i]) + len(responses[i]), i))
    row = _RowWriter(filler)
    prefixes, answers = [], []
    for cut in _cut([len(p) for p in unique], block_cells):
        rows = [p[:-1] for p in unique[cut]]
        prefixes.append(Block(rows=len(rows), width=row.write(rows, places=False)))
    for cut in _cut([len(responses[i]) for i in together], block_cells):
        own = together[cut]
        prompt = torch.tensor([numbers[tuple(prompts[i])] for i in own])
        rows = [(prompts[i][-1], *responses[i][:-1]) for i in own]
        width = row.write(rows, starts=[len(prompts[i]) - 1 for i in own])
        answers.append(Block(rows=len(own), width=width, prompt=prompt))
    for cut in _cut([len(prompts[i]) + len(responses[i]) for i in alone], block_cells):
        own = alone[cut]
        rows = [(*prompts[i], *responses[i][:-1]) for i in own]
        answers.append(Block(rows=len(own), width=row.write(rows, unread=[len(prompts[i]) - 1 for i in own])))
    part = SharedPart(
        input_ids=torch.tensor([row.ids]),
        position_ids=torch.tensor([row.positions]),
        places=torch.tensor(row.places),
        num_tokens=row.num_tokens,
        prefix_lengths=torch.tensor([len(p) - 1 for p in unique], dtype=torch.long),
        prefixes=prefixes,
        responses=answers,
    )
    return part, [*together, *alone]


def _split(indices: Sequence[int], prompts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return the samples whose prompt another one has as well, and the others."""
    counts = Counter(tuple(prompts[i]) for i in indices)
    together = [i for i in indices if counts[tuple(prompts[i])] > 1]
    return together, [i for i in indices if counts[tuple(prompts[i])] == 1]


def _cut(lengths: Sequence[int], block_cells: int) -> list[slice]:
    """Cut rows of ascending ``lengths`` into blocks."""
    sizes = cut_by_length(lengths, own_cells=block_cells)
    return [slice(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


class _RowWriter:
    """A sequence to which right-padded rows are appended."""

    def __init__(self, filler: int) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.places: list[int] = []
        """Of the tokens that predict a response token."""
        self.num_tokens = 0
        """Padding left out."""
        self._filler = filler

    def write(
        self,
        rows: Sequence[Sequence[int]],
        *,
        starts: Sequence[int] = (),
        unread: Sequence[int] = (),
        places: bool = True,
    ) -> int:
        """Append rows in ascending order of length; return their width.

        Args:
            rows: tokens.
            starts: position of each row's first token; default 0.
            unread: how many tokens of each row predict nothing that is asked for; default 0.
            places: the others do.
        """
        width = len(rows[-1])
        for number, tokens in enumerate(rows):
            length, missing, begin = len(tokens), width - len(tokens), len(self.ids)
            start = starts[number] if starts else 0
            if places:
                self.places.extend(range(begin + (unread[number] if unread else 0), begin + length))
            self.ids.extend((*tokens, *[self._filler] * missing))
            self.positions.extend((*range(start, start + length), *[start + max(length - 1, 0)] * missing))
            self.num_tokens += length
        return width


def read_shared(
    model: Any,
    parts: Sequence[SharedPart],
    read: Callable[[Any], tuple[Tensor, ...]],
    *,
    want_logits: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """Run ``parts`` and return what ``read`` finds in the outputs, for all response tokens: [N, ...] each.

    Args:
        model: causal language model or its decoder.
        parts: what to compute.
        read: takes one output of ``model`` to tensors [1, M or N, ...].
        want_logits: ``model`` has a head, and its logits of the response tokens are wanted.
        kwargs: passed to ``model`` with every part.
    """
    found: list[tuple[Tensor, ...]] = []
    with use_attention([model], BLOCKS):
        for part in parts:
            blocks = Blocks(part.prefixes, part.prefix_lengths, part.responses)
            # of all tokens they would be M times the vocabulary
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
    """Whether ``model`` computes the same logits with a shared prompt as without; tried on a few tokens.

    Models with another state than keys and values (Mamba), with attention windows, or whose attention does
    not go through ``transformers``' interface do not.
    """
    if getattr(model, "_is_stateful", False) or not can_attend_in_blocks(model):
        return False
    # a window is wider than the probe's few tokens, so it has to be asked for
    if has_windows(model):
        return False
    size = int(model.config.get_text_config().vocab_size)
    # two groups whose prompts differ in length, in one block, and a sample that is alone
    prompts = [[i % size for i in row] for row in 2 * [[5, 3, 9, 4]] + 2 * [[7, 1]] + [[8, 2, 6]]]
    responses = [[i % size for i in row] for row in ([2, 8, 6], [9, 5], [4, 6, 8, 3], [1, 7], [3, 9, 4, 5])]
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
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError, IndexError) as error:
        logger.info("prompts of a group are computed per sample: %s", error)
        return False
    whole = torch.cat(plain)
    tolerance = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1
    gap = float((shared.float() - whole).abs().max() / whole.abs().max().clamp(min=1.0))
    if not gap <= tolerance:
        logger.info("prompts of a group are computed per sample: a shared prompt moves logits by %.2g", gap)
        return False
    return True
